//! One of the two processes of a measurement: pinned to a core, in its own namespace.

use std::error::Error;
use std::fs::File;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use nix::unistd::setsid;
use rocinante::{Backend, Exchange, Interface, PortConfig};
use rocinante_netdev::packet::PacketPort;
use rocinante_netdev::udp::UdpPort;
use rocinante_netdev::xdp::XdpPort;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::machine::{self, Mode};
use super::ours::Device;
use super::tcp;
use crate::ceiling::{self, Flow, Link, PacketLink, PortLink, Tally, UdpLink};
use crate::figure::{Figures, Plan};

/// Which of the two processes this is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Role {
    /// Sends, and reports the figures.
    Sender,
    /// Receives.
    Receiver,
}

/// What is measured.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, clap::ValueEnum,
)]
#[serde(rename_all = "lowercase")]
pub(super) enum Subject {
    /// The raw ceiling.
    Ceiling,
    /// The port of the backend, with no engine behind it.
    Port,
    /// RDMA through the verbs.
    Ours,
    /// One TCP stream of iperf3.
    Iperf3,
    /// One TCP stream, both ends spinning.
    Tcp,
}

impl Subject {
    /// As on the command line and in JSON.
    #[must_use]
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Ceiling => "ceiling",
            Self::Port => "port",
            Self::Ours => "ours",
            Self::Iperf3 => "iperf3",
            Self::Tcp => "tcp",
        }
    }
}

/// Everything that a worker is told.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Job {
    /// Which of the two it is.
    pub role: Role,
    /// What to measure.
    pub subject: Subject,
    /// Over which backend, by name.
    pub netdev: String,
    /// Own address.
    pub local: Ipv4Addr,
    /// The peer's address.
    pub remote: Ipv4Addr,
    /// The core to run on.
    pub core: usize,
    /// The core that the other runs on.
    pub peer_core: usize,
    /// The file that holds the [`Tally`].
    pub tally: PathBuf,
    /// Whether to go before everything else that runs on the machine.
    pub urgent: bool,
    /// What to measure, and how long.
    pub plan: Plan,
}

/// What the sender reports.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Sample {
    /// The figures.
    pub figures: Figures,
    /// The speed of the machine before.
    pub mode: Mode,
    /// The speed of the machine afterwards.
    pub mode_after: Mode,
    /// Counters that explain a figure.
    pub notes: Value,
}

/// TCP port of the exchange between the two.
const PORT: u16 = 18_515;
const PATIENCE: Duration = Duration::from_secs(10);

impl Job {
    /// Does the work. The sender's result goes to standard output, as one line of JSON.
    ///
    /// # Errors
    /// What could not be measured, and why.
    pub(super) fn run(&self) -> Result<(), Box<dyn Error>> {
        self.settle();
        if self.subject == Subject::Iperf3 {
            return Err(self.iperf3().into());
        }
        let mode = (self.role == Role::Sender).then(|| Mode::now(self.peer_core));
        let mut exchange = self.exchange()?;
        let (figures, notes) = match self.subject {
            Subject::Ours => self.ours(&mut exchange)?,
            Subject::Tcp => self.tcp(&mut exchange)?,
            _ => (self.raw(&mut exchange)?, Value::Null),
        };
        if let Some(mode) = mode {
            let sample = Sample { figures, mode, mode_after: Mode::now(self.peer_core), notes };
            println!("{}", serde_json::to_string(&sample)?);
        }
        Ok(())
    }

    /// Keeps to one core, and gets that core first if it may: a session of its own is scheduled as one group,
    /// whose weight is its own.
    fn settle(&self) {
        if self.urgent && setsid().is_ok() {
            let _ = std::fs::write("/proc/self/autogroup", "-20");
        }
        machine::pin(self.core);
    }

    fn exchange(&self) -> Result<Exchange, Box<dyn Error>> {
        let mut exchange = match self.role {
            Role::Receiver => Exchange::accept(SocketAddr::from((self.local, PORT)))?,
            Role::Sender => Exchange::connect(SocketAddr::from((self.remote, PORT)), PATIENCE)?,
        };
        exchange.set_patience(Some(PATIENCE));
        Ok(exchange)
    }

    fn backend(&self) -> Result<Backend, Box<dyn Error>> {
        Ok(self.netdev.parse()?)
    }

    fn ours(&self, exchange: &mut Exchange) -> Result<(Figures, Value), Box<dyn Error>> {
        let device = Device::connect(self.backend()?, self.local, self.plan.mtu, exchange)?;
        let figures = match self.role {
            Role::Sender => device.measure(exchange, &self.plan)?,
            Role::Receiver => {
                device.answer(exchange, &self.plan)?;
                Figures::new()
            }
        };
        let mut notes = device.notes();
        match self.role {
            Role::Sender => notes["peer"] = serde_json::from_str(&exchange.hear()?)?,
            Role::Receiver => exchange.say(&notes.to_string())?,
        }
        exchange.barrier("bye")?;
        Ok((figures, notes))
    }

    fn raw(&self, exchange: &mut Exchange) -> Result<Figures, Box<dyn Error>> {
        let flow = Flow { local: self.local, remote: self.remote };
        let interface = Interface::by_address(IpAddr::V4(self.local))?;
        exchange.say(&serde_json::to_string(&interface.mac)?)?;
        let mac = serde_json::from_str(&exchange.hear()?)?;
        let (own, config) = ([IpAddr::V4(self.local)], PortConfig::default());
        match (self.subject, self.backend()?) {
            (Subject::Ceiling, Backend::Udp) => self.drive(UdpLink::open(flow)?, exchange),
            (Subject::Ceiling, Backend::Packet) => {
                self.drive(PacketLink::open(flow, mac)?, exchange)
            }
            (_, Backend::Udp) => {
                let port = UdpPort::open(&interface, &own, &config)?;
                self.drive(PortLink::new(port, flow)?, exchange)
            }
            (_, Backend::Packet) => {
                let port = PacketPort::open(&interface, &own, &config)?;
                self.drive(PortLink::new(port, flow)?, exchange)
            }
            (_, Backend::Xdp) => {
                let port = XdpPort::open(&interface, &own, &config)?;
                self.drive(PortLink::new(port, flow)?, exchange)
            }
            (_, Backend::Sim) => Err("the simulator has no ceiling".into()),
        }
    }

    fn drive(
        &self,
        mut link: impl Link,
        exchange: &mut Exchange,
    ) -> Result<Figures, Box<dyn Error>> {
        let tally = Tally::map(&File::options().read(true).write(true).open(&self.tally)?)?;
        exchange.barrier("open")?;
        let figures = match self.role {
            Role::Sender => ceiling::measure(&mut link, exchange, &tally, &self.plan)?,
            Role::Receiver => {
                ceiling::answer(&mut link, exchange, &tally, &self.plan)?;
                Figures::new()
            }
        };
        exchange.barrier("bye")?;
        Ok(figures)
    }

    fn tcp(&self, exchange: &mut Exchange) -> Result<(Figures, Value), Box<dyn Error>> {
        let gbps = match self.role {
            Role::Receiver => {
                let listener = tcp::listen(self.local)?;
                exchange.barrier("listening")?;
                let gbps = tcp::receive(&listener)?;
                exchange.say(&gbps.to_string())?;
                gbps
            }
            Role::Sender => {
                exchange.barrier("listening")?;
                tcp::send(self.remote, Duration::from_secs_f64(self.plan.seconds))?;
                exchange.hear()?.parse()?
            }
        };
        Ok((Figures::new(), gbps.into()))
    }

    /// Becomes iperf3; returns only if it cannot.
    fn iperf3(&self) -> String {
        let mut command = Command::new("iperf3");
        match self.role {
            Role::Receiver => command.args(["-s", "-1", "-B", &self.local.to_string()]),
            Role::Sender => {
                let seconds = self.plan.seconds.ceil().max(1.0).to_string();
                command.args(["-c", &self.remote.to_string(), "-J", "-t", &seconds])
            }
        };
        format!("cannot start iperf3: {}: install it", command.exec())
    }
}
