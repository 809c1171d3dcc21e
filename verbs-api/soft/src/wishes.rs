//! The options of a device in software, and the device that they open.

use std::ffi::OsStr;
use std::io::ErrorKind;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use rocinante_netdev::handed::Agent;
use rocinante_netdev::{AnyPort, Backend, Interface, PortConfig, auto};

use super::charge::Charge;
use super::choice::BackendChoice;
use super::faults::{Chosen, FaultWish, Met};
use super::opens::{Key, open};
use super::others::SHARDS_MAX;
use super::prepared::Prepared;
use super::{Device, Hca, Inbox};
use crate::model::device::Limits;
use crate::model::error::VerbsError;
use crate::provider::trace;
use crate::tuning::connections::KEEP_ALIVE;

/// The options that a program gives; all others are at their defaults.
#[derive(Debug, Clone, Default)]
pub struct Wishes {
    pub netdev: BackendChoice,
    pub port: PortConfig,
    pub limits: Limits,
    pub window_max: Option<u32>,
    pub background: Option<bool>,
    pub advertise_credits: bool,
    pub whole_writes: bool,
    pub no_recognition: bool,
    pub cm_retries: Option<u8>,
    /// Requests and questions wait for their listener for 0.5 s before they are refused: perftest
    /// and qperf tell their peer that they listen before they do, and end if it is refused.
    pub refuses_late: bool,
    pub shards: Option<usize>,
    pub cpus: Vec<usize>,
    pub fault: FaultWish,
    /// The context is none of the program's, so it counts for no limit: one in the place of the
    /// kernel's connection manager.
    pub uncounted: bool,
}

/// The settings of a new device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// How the ports were opened.
    pub port: PortConfig,
    pub limits: Limits,
    /// The most packets that a queue pair may have unacknowledged.
    pub window_max: u32,
    pub advertise_credits: bool,
    pub cut_writes: bool,
    /// Whether the device asks peers for their kind, and answers such questions.
    pub recognises: bool,
    /// Whether a thread drives the device while the program does not.
    pub background: bool,
    /// How often the connection manager repeats a message, if the program sets it.
    pub cm_retries: Option<u8>,
    /// The silence after which peers of connections are asked whether they are still there, unless
    /// the connection has a value of its own; zero for never.
    pub keep_alive: Duration,
    /// Whether requests wait for their listener for a while.
    pub refuses_late: bool,
    /// The processors of the threads: one per shard, starting again from the first. If empty, the
    /// threads are not pinned.
    pub cpus: Vec<usize>,
    /// The choice of faults of the program that opened it.
    pub fault: FaultWish,
}

/// The environment variable that names the backend if the program does not: `afxdp`, `packet`,
/// `udp` or `auto`.
pub const NETDEV_VARIABLE: &str = "ROCINANTE_NETDEV";

/// The environment variable that sets the number of shards of a device in software if the program
/// does not: see `OpenOptions::shards`.
pub const SHARDS_VARIABLE: &str = "ROCINANTE_SHARDS";

/// Leads to the faults, at the end of the reason for a backend.
pub const FAULTS_ARE_ON: &str = "faults are on: ";

/// The environment variable with the seconds of silence after which the peer of a connection is
/// asked whether it is still there, if the program does not set them: see
/// `cm::Params::keep_alive`. `0` or `off` for never.
pub const KEEP_ALIVE_VARIABLE: &str = "ROCINANTE_KEEP_ALIVE";

impl Wishes {
    /// Checks the options, and opens nothing. Error: an option is out of range.
    pub fn prepare(
        self,
        iface: &Interface,
        addresses: &[IpAddr],
        are_all: bool,
    ) -> Result<Prepared, VerbsError> {
        if let Some(times) = self.cm_retries.filter(|times| *times > 15) {
            let why = format!("the connection manager repeats itself 0 to 15 times, not {times}");
            return Err(VerbsError::Invalid(why));
        }
        let (backend, shards) = self.settle()?;
        if shards.unwrap_or(1) > 1 && self.background == Some(false) {
            let why = "several shards need their background threads: leave them, or open one shard";
            return Err(VerbsError::Invalid(why.into()));
        }
        Prepared::new(self, (backend, shards), iface, (addresses, are_all))
    }

    /// The backend and the number of shards, of these options or else of the environment. Error: a
    /// variable has a value that it cannot have.
    pub fn settle(&self) -> Result<(Option<Backend>, Option<usize>), VerbsError> {
        let backend = self.netdev.settle(std::env::var_os(NETDEV_VARIABLE).as_deref())?;
        keep_alive()?;
        agent()?;
        self.fault.settle()?;
        let shards = settle_shards(self.shards, std::env::var_os(SHARDS_VARIABLE).as_deref())?;
        Ok((backend, shards))
    }

    /// As [`prepare`](Self::prepare), for an interface with all its addresses. Error: as there; or
    /// no interface has the name.
    pub fn prepare_interface(self, name: &str) -> Result<Prepared, VerbsError> {
        let iface = Interface::by_name(name).map_err(|error| match error.kind() {
            ErrorKind::NotFound => VerbsError::NoDevice(format!("the name {name:?}")),
            _ => VerbsError::Io(error),
        })?;
        let addresses: Vec<IpAddr> = iface.addresses.iter().map(|(address, _)| *address).collect();
        self.prepare(&iface, &addresses, true)
    }

    /// Opens a device over an existing port, such as one of the simulator's. Error: the operating
    /// system has no descriptors or threads left.
    pub fn open_port(
        self,
        name: &str,
        port: AnyPort,
        why: &str,
    ) -> Result<Arc<Device>, VerbsError> {
        if self.shards.is_some_and(|count| count != 1) {
            return Err(VerbsError::Invalid("a device over one port has one shard".into()));
        }
        let events = Arc::new(Inbox::new()?);
        let met = meet(self.fault.settle()?, vec![port], why.to_owned())?;
        let Met { ports, why, of_device: faults } = met;
        let (parts, why) = ((ports, None), (why, None));
        let hca = Hca::start(&self.settings(), name, parts, why, faults, None)?;
        Device::new(hca, events, !self.uncounted).inspect(|device| device.trace_opened())
    }

    pub(super) fn settings(&self) -> Settings {
        Settings {
            port: self.port.clone(),
            limits: self.limits,
            window_max: self.window_max.unwrap_or(512),
            advertise_credits: self.advertise_credits,
            cut_writes: !self.whole_writes,
            recognises: !self.no_recognition,
            background: self.background.unwrap_or(true),
            cm_retries: self.cm_retries,
            // A wrong value was refused before.
            keep_alive: keep_alive().unwrap_or(KEEP_ALIVE),
            refuses_late: self.refuses_late,
            cpus: self.cpus.clone(),
            fault: self.fault.clone(),
        }
    }

    /// Whether a device that this process has open already suits these options: those that the
    /// program left at their defaults suit any device.
    fn suit(
        &self,
        device: &Hca,
        backend: Option<Backend>,
        shards: Option<usize>,
    ) -> Result<(), VerbsError> {
        let (is, wanted) = (&device.settings, self.settings());
        let suits = [
            ("netdev", backend.is_none_or(|backend| device.is_taken_as(backend))),
            ("shards", shards.is_none_or(|count| count == device.shards.count())),
            ("port", wanted.port == is.port || self.port == PortConfig::default()),
            ("limits", wanted.limits == is.limits || self.limits == Limits::default()),
            ("window_max", wanted.window_max == is.window_max || self.window_max.is_none()),
            ("advertise_credits", is.advertise_credits || !self.advertise_credits),
            ("cut_writes", !is.cut_writes || !self.whole_writes),
            ("recognise_peers", !is.recognises || !self.no_recognition),
            ("background", wanted.background == is.background || self.background.is_none()),
            ("cm_retries", wanted.cm_retries == is.cm_retries || self.cm_retries.is_none()),
            ("cpus", wanted.cpus == is.cpus || self.cpus.is_empty()),
            ("fault", wanted.fault == is.fault || self.fault == FaultWish::default()),
        ];
        match suits.iter().find(|(_, suits)| !suits) {
            None => Ok(()),
            Some((option, _)) => Err(VerbsError::Invalid(format!(
                "{} is open in this process with another `{option}`: open it with the same, or \
                 close it first",
                device.name
            ))),
        }
    }

    pub(super) fn start(
        &self,
        iface: &Interface,
        (addresses, are_all): (&[IpAddr], bool),
        (backend, shards): (Option<Backend>, Option<usize>),
        events: Arc<Inbox>,
    ) -> Result<Arc<Device>, VerbsError> {
        let agent = agent()?;
        let mut charged = None;
        let start = |claim| {
            let count = shards.unwrap_or(1);
            let (shards, slots) = auto::lease(iface, addresses, &self.port, count)?;
            // Before the ports: without room for the context they cost the host nothing.
            let charge = Charge::context(slots.as_ref(), !self.uncounted)?;
            let sharing = (shards, slots.as_ref());
            let (ports, choice) =
                auto::choose_shards(iface, addresses, backend, &self.port, sharing, &agent)?;
            let met = meet(self.fault.settle()?, ports, choice.to_string())?;
            let Met { ports, why, of_device: faults } = met;
            let parts = (ports, slots);
            let instead_of = backend.filter(|named| *named != choice.backend);
            let why = (why, instead_of);
            let hca = Hca::start(&self.settings(), &iface.name, parts, why, faults, claim)?;
            charged = Some(charge);
            Ok(hca)
        };
        let key = Key::new(iface.index, addresses, are_all);
        let hca = open(key, |device| self.suit(device, backend, shards), start)?;
        let device = match charged {
            Some(charge) => Device::charged(hca, events, charge),
            None => Device::new(hca, events, !self.uncounted)?,
        };
        device.trace_opened();
        Ok(device)
    }
}

/// Puts faults before the ports, if there are any, and adds them to the reason for the backend.
fn meet(faults: Option<Chosen>, ports: Vec<AnyPort>, mut why: String) -> Result<Met, VerbsError> {
    let Some(faults) = faults else { return Ok(Met { ports, why, of_device: None }) };
    why += "; ";
    why += FAULTS_ARE_ON;
    faults.before(ports, why)
}

impl Device {
    fn trace_opened(&self) {
        trace::opened(&self.name, &self.query());
    }
}

/// The number of shards: the program's, else the variable's.
fn settle_shards(
    said: Option<usize>,
    variable: Option<&OsStr>,
) -> Result<Option<usize>, VerbsError> {
    let most = SHARDS_MAX;
    let (source, count) = match (said, variable.filter(|text| !text.is_empty())) {
        (Some(count), _) => ("shards".to_owned(), Some(count)),
        (None, None) => return Ok(None),
        (None, Some(text)) => {
            let count = text.to_str().and_then(|text| text.parse().ok());
            (format!("{SHARDS_VARIABLE}={}", text.to_string_lossy()), count)
        }
    };
    match count {
        Some(count) if (1..=most).contains(&count) => Ok(Some(count)),
        Some(count) => Err(VerbsError::Invalid(format!(
            "{source}: a device has 1 to {most} shards, not {count}"
        ))),
        None => Err(VerbsError::Invalid(format!("{source}: a device has 1 to {most} shards"))),
    }
}

/// The agent of the environment.
fn agent() -> Result<Agent, VerbsError> {
    Agent::from_environment().map_err(VerbsError::Invalid)
}

/// The keep-alive time of the environment.
fn keep_alive() -> Result<Duration, VerbsError> {
    settle_keep_alive(std::env::var_os(KEEP_ALIVE_VARIABLE).as_deref())
}

fn settle_keep_alive(variable: Option<&OsStr>) -> Result<Duration, VerbsError> {
    let Some(text) = variable.filter(|text| !text.is_empty()) else { return Ok(KEEP_ALIVE) };
    let text = text.to_string_lossy();
    if text == "off" {
        return Ok(Duration::ZERO);
    }
    let seconds = text.parse().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    seconds.ok_or_else(|| {
        VerbsError::Invalid(format!("{KEEP_ALIVE_VARIABLE}={text}: give it seconds, or `off`"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_environment_says_how_long_a_peer_may_be_silent() {
        let settled = |text: Option<&str>| settle_keep_alive(text.map(OsStr::new));
        for (text, seconds) in [
            (None, 10.0),
            (Some(""), 10.0),
            (Some("0"), 0.0),
            (Some("off"), 0.0),
            (Some("30"), 30.0),
            (Some("2.5"), 2.5),
        ] {
            assert_eq!(settled(text).unwrap(), Duration::from_secs_f64(seconds), "{text:?}");
        }
        for text in ["-1", "NaN", "inf", "1e30", "10s", "on"] {
            let error = settled(Some(text)).unwrap_err().to_string();
            assert!(error.contains("ROCINANTE_KEEP_ALIVE") && error.contains(text), "{error}");
        }
    }

    #[test]
    fn the_program_says_of_how_many_shards_it_is_or_else_the_environment() {
        let settled = |said, variable: Option<&str>| settle_shards(said, variable.map(OsStr::new));
        for (said, variable, count) in [
            (None, None, None),
            (None, Some(""), None),
            (None, Some("3"), Some(3)),
            (Some(64), Some("x"), Some(64)),
        ] {
            assert_eq!(settled(said, variable).unwrap(), count);
        }
        for (said, variable, words) in [
            (None, Some("0"), "ROCINANTE_SHARDS=0: a device has 1 to 64 shards, not 0"),
            (None, Some("two"), "ROCINANTE_SHARDS=two: a device has 1 to 64 shards"),
            (Some(65), None, "shards: a device has 1 to 64 shards, not 65"),
        ] {
            let error = settled(said, variable).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
    }
}
