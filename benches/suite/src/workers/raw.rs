//! Measures the baselines of our backends.

use std::fs::File;
use std::net::IpAddr;
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};

use rocinante::device::{Backend, Interface, PortConfig};
use rocinante::exchange::Exchange;
use rocinante_baselines::{
    Flow, Link, PacketLink, PortLink, QuinnLink, Raw, Tally, Task, UdpLink, answer, measure,
};
use rocinante_netdev::{OpenError, PacketPort, Parts, Port, Shards, UdpPort, XdpPort};
use serde::{Deserialize, Serialize};

use super::job::{Outcome, Work, backend};
use super::place::{Link as Way, Places};
use rocinante_cli::measure::Side;
use rocinante_cli::output::{Failure, Result};

/// The carrier of the packets: it sends and receives them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Carrier {
    /// Sockets of their own, as the backend of this name uses them: its baseline.
    Baseline(String),
    /// The port of the backend of this name, with no engine behind it.
    Port(String),
    /// UDP sockets driven by `quinn-udp`.
    QuinnUdp,
}

impl Places {
    /// What `carrier` carries over `link` without a protocol.
    pub(crate) fn carried(
        &self,
        link: Way,
        carrier: Carrier,
        tasks: Vec<Task>,
    ) -> Result<Vec<(Task, Raw)>> {
        let tally = Tally::file();
        let tally = tally.map_err(|error| Failure::Failed(format!("the tally: {error}")))?;
        // The processes have the same user and the same mount namespace.
        let path = format!("/proc/{}/fd/{}", std::process::id(), tally.as_raw_fd());
        let work = Work::Raw { carrier, tasks: tasks.clone(), tally: PathBuf::from(path) };
        match self.run(link, &work)? {
            Outcome::Raw(raw) => Ok(tasks.into_iter().zip(raw).collect()),
            _ => Err(Failure::Failed("it measured no raw baseline".into())),
        }
    }
}

/// Measures `tasks` together with the other side. Returns the results on the first side.
pub(super) fn run(
    side: Side,
    carrier: &Carrier,
    (local, remote): (IpAddr, IpAddr),
    tally: &Path,
    tasks: &[Task],
    exchange: &mut Exchange,
) -> Result<Vec<Raw>> {
    let (IpAddr::V4(v4), IpAddr::V4(to)) = (local, remote) else {
        return Err(Failure::Failed(
            "raw baselines are measured over IPv4: give IPv4 addresses".into(),
        ));
    };
    let flow = Flow { local: v4, remote: to };
    let interface = Interface::by_address(local).map_err(|error| failed(&error))?;
    exchange.say(&serde_json::to_string(&interface.mac).expect("an address is JSON"))?;
    let line = exchange.hear()?;
    let mac =
        serde_json::from_str(&line).map_err(|_| exchange.error(format_args!("it sent {line}")))?;
    let both = Both { side, tally, tasks };
    let (own, config) = ([local], PortConfig::default());
    let (backend, port) = match carrier {
        Carrier::Baseline(name) => (backend(name)?, false),
        Carrier::Port(name) => (backend(name)?, true),
        Carrier::QuinnUdp => {
            let link = QuinnLink::open(flow).map_err(|error| failed(&error))?;
            return both.drive(link, exchange);
        }
    };
    match (backend, port) {
        (Backend::Udp, false) => {
            both.drive(UdpLink::open(flow).map_err(|error| failed(&error))?, exchange)
        }
        (Backend::Packet, false) => {
            both.drive(PacketLink::open(flow, mac).map_err(|error| failed(&error))?, exchange)
        }
        (Backend::Udp, true) => {
            let parts = UdpPort::acquire(&interface, &own, &config, Shards::ONE, None);
            both.drive(linked(parts, UdpPort::assemble, flow)?, exchange)
        }
        (Backend::Packet, true) => {
            let parts = PacketPort::acquire(&interface, &own, &config, Shards::ONE, None);
            both.drive(linked(parts, PacketPort::assemble, flow)?, exchange)
        }
        (Backend::Xdp, _) => {
            let parts = XdpPort::acquire(&interface, &own, &config, Shards::ONE, None);
            both.drive(linked(parts, XdpPort::assemble, flow)?, exchange)
        }
        (Backend::Sim, _) => Err(Failure::Failed("the simulator has no raw baseline".into())),
    }
}

fn failed(error: &dyn std::fmt::Display) -> Failure {
    Failure::Failed(error.to_string())
}

/// A link over the port of these parts.
fn linked<P: Port>(
    parts: Result<Vec<Parts>, OpenError>,
    assemble: fn(Parts) -> Result<P, OpenError>,
    flow: Flow,
) -> Result<PortLink<P>> {
    let port = parts.and_then(|mut parts| assemble(parts.remove(0)));
    PortLink::new(port.map_err(|error| failed(&error))?, flow).map_err(|error| failed(&error))
}

struct Both<'a> {
    side: Side,
    tally: &'a Path,
    tasks: &'a [Task],
}

impl Both<'_> {
    fn drive(&self, mut link: impl Link, exchange: &mut Exchange) -> Result<Vec<Raw>> {
        let why = |error: std::io::Error| Failure::Failed(format!("the tally: {error}"));
        let file = File::options().read(true).write(true).open(self.tally).map_err(why)?;
        let tally = Tally::map(&file).map_err(why)?;
        exchange.barrier("open")?;
        let raw = match self.side {
            Side::First => measure(&mut link, exchange, &tally, self.tasks)?,
            Side::Second => {
                answer(&mut link, exchange, &tally, self.tasks)?;
                Vec::new()
            }
        };
        Ok(raw)
    }
}
