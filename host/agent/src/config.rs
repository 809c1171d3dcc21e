//! The agent's configuration.

use std::fs;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use rocinante_netdev::handed::DEFAULT_PATH;
use serde::Deserialize;

use crate::class::{Class, Uplink};
use crate::error::AgentError;
use crate::log::LogLevel;

/// The configuration, a file of TOML: `host/agent/dist/agent.toml` has each option and its default.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// The socket that programs connect to.
    pub socket: PathBuf,
    /// The file that a restarted agent reads: on a tmpfs, in a directory of root's that no
    /// container sees.
    pub state: PathBuf,
    /// The command `rocinante`, which ends the connections of programs that have died. A path that
    /// is not absolute begins at the agent's own directory. Empty: that is not done.
    pub guardian: PathBuf,
    /// Ports that a container may have at a time.
    pub ports_max: usize,
    /// Memory in MiB that the receive rings of a container's ports may take, and their frames
    /// (`afxdp`).
    pub ring_mib_max: usize,
    /// The same of all ports, or a quarter of the machine's memory if that is less. Half of it is
    /// promised to containers, the other half is for those that want more.
    pub ring_mib_total: usize,
    /// Containers that the promised half is divided among; more of them share it.
    pub containers_expected: usize,
    /// Frames that one receive ring may have. Each takes 68 KiB, of `afxdp` 8 KiB.
    pub ring_frames_max: u32,
    /// Requests of a container in a second that are looked at.
    pub requests_per_second: u32,
    /// Captures of containers' programs at a time, of each interface one. 0: none.
    pub captures_max: usize,
    /// Containers whose network is administered by themselves.
    pub self_administered: SelfAdministered,
    /// Containers that leave by other interfaces than veths to this host, too.
    pub other_ways_out: OtherWaysOut,
    /// Containers whose pod has no claim.
    pub default_policy: DefaultPolicy,
    /// The lines of the log.
    pub log: LogLevel,
    /// The classes of containers, in their order.
    #[serde(rename = "class")]
    pub classes: Vec<Class>,
    /// Where metrics are served over HTTP: an address with its port, or a path. Empty: nowhere.
    pub metrics: String,
    /// Links that leave the host and are shared.
    #[serde(rename = "uplink")]
    pub uplinks: Vec<Uplink>,
}

/// Names of files beside the state.
const RESERVED: [&str; 2] = ["control", "counters"];

/// The rule for a container whose processes may change its addresses: they have `CAP_NET_ADMIN`
/// over its network, or may get it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SelfAdministered {
    /// The addresses that it has when it first asks are its own; it may lose some, and gets no
    /// others.
    Fixed,
    /// The addresses that it gives itself are its own.
    Follow,
    /// It gets no port.
    Refuse,
}

/// The rule for a container with an interface whose frames the agent cannot judge, such as a
/// macvlan or a virtual function of a card.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OtherWaysOut {
    /// It gets no port.
    Refuse,
    /// It gets ports of its veth. Those of `packet` can send any frame by the other interface.
    Accept,
}

/// The rule for the RoCEv2 packets of a container whose pod has no claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DefaultPolicy {
    /// They leave it.
    Open,
    /// They are dropped at its host's end.
    Claimed,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            socket: DEFAULT_PATH.into(),
            state: "/run/rocinante-agent/state.json".into(),
            guardian: "rocinante".into(),
            ports_max: 64,
            ring_mib_max: 512,
            ring_mib_total: 4096,
            containers_expected: 64,
            ring_frames_max: 256,
            requests_per_second: 100,
            captures_max: 8,
            self_administered: SelfAdministered::Fixed,
            other_ways_out: OtherWaysOut::Refuse,
            default_policy: DefaultPolicy::Open,
            log: LogLevel::Info,
            classes: Vec::new(),
            metrics: String::new(),
            uplinks: Vec::new(),
        }
    }
}

impl Config {
    /// Reads a file.
    ///
    /// # Errors
    /// There is none, or it is not understood: the error names the line.
    pub fn read(path: &Path) -> Result<Self, AgentError> {
        let hint = "host/agent/dist/agent.toml has every option";
        let what = |error: &dyn std::fmt::Display| format!("{}: {error}", path.display());
        let text = fs::read_to_string(path).map_err(|e| AgentError::new(what(&e), hint))?;
        let config: Self = toml::from_str(&text).map_err(|e| AgentError::new(what(&e), hint))?;
        config.check().map_err(|e| AgentError::new(what(&e), hint))?;
        Ok(config)
    }

    /// Bytes of memory that the ports of all containers may take.
    pub(crate) fn ring_bytes_total(&self) -> usize {
        let machine = rustix::system::sysinfo();
        // Of a 32-bit kernel they may be more than a number holds.
        let memory = (machine.totalram as usize).saturating_mul(machine.mem_unit as usize);
        (self.ring_mib_total << 20).min(memory / 4)
    }

    /// Where the guardian is, if it is there.
    ///
    /// # Errors
    /// It is not.
    pub(crate) fn guardian(&self) -> io::Result<Option<PathBuf>> {
        if self.guardian.as_os_str().is_empty() {
            return Ok(None);
        }
        let beside = std::env::current_exe()?.with_file_name(&self.guardian);
        fs::metadata(&beside)?;
        Ok(Some(beside))
    }

    /// Takes over those options of the configuration in force that stay until the agent is started
    /// again. Returns the names of those that would change.
    pub(crate) fn keep(&mut self, old: &Self) -> Vec<&'static str> {
        let mut kept = self.differences(old);
        self.socket.clone_from(&old.socket);
        self.state.clone_from(&old.state);
        self.guardian.clone_from(&old.guardian);
        self.metrics.clone_from(&old.metrics);
        let left = self.differences(old);
        kept.retain(|option| !left.contains(option));
        kept
    }

    /// The names of the options that are different.
    pub(crate) fn differences(&self, other: &Self) -> Vec<&'static str> {
        let Self {
            socket,
            state,
            guardian,
            ports_max,
            ring_mib_max,
            ring_mib_total,
            containers_expected,
            ring_frames_max,
            requests_per_second,
            captures_max,
            self_administered,
            other_ways_out,
            default_policy,
            log,
            classes,
            metrics,
            uplinks,
        } = self;
        let all = [
            ("socket", *socket != other.socket),
            ("state", *state != other.state),
            ("guardian", *guardian != other.guardian),
            ("ports_max", *ports_max != other.ports_max),
            ("ring_mib_max", *ring_mib_max != other.ring_mib_max),
            ("ring_mib_total", *ring_mib_total != other.ring_mib_total),
            ("containers_expected", *containers_expected != other.containers_expected),
            ("ring_frames_max", *ring_frames_max != other.ring_frames_max),
            ("requests_per_second", *requests_per_second != other.requests_per_second),
            ("captures_max", *captures_max != other.captures_max),
            ("self_administered", *self_administered != other.self_administered),
            ("other_ways_out", *other_ways_out != other.other_ways_out),
            ("default_policy", *default_policy != other.default_policy),
            ("log", *log != other.log),
            ("class", *classes != other.classes),
            ("metrics", *metrics != other.metrics),
            ("uplink", *uplinks != other.uplinks),
        ];
        all.into_iter().filter(|(_, differs)| *differs).map(|(option, _)| option).collect()
    }

    fn check(&self) -> Result<(), String> {
        let fault = match self {
            Self { requests_per_second: 0, .. } => Err("requests_per_second is at least 1"),
            Self { ring_frames_max: 0, .. } => Err("ring_frames_max is at least 1"),
            Self { ports_max: 0, .. } => Err("ports_max is at least 1"),
            Self { ring_mib_max: 0, .. } => Err("ring_mib_max is at least 1"),
            Self { ring_mib_total: 0, .. } => Err("ring_mib_total is at least 1"),
            Self { containers_expected: 0, .. } => Err("containers_expected is at least 1"),
            Self { socket, state, .. } if socket.parent() == state.parent() => {
                Err("socket and state are in different directories: containers see the socket's")
            }
            Self { state, .. }
                if RESERVED.iter().any(|it| state.file_stem() == Some(it.as_ref())) =>
            {
                Err("state has another name: control.sock and counters.json are beside it")
            }
            Self { socket, state, .. } if socket.is_relative() || state.is_relative() => {
                Err("socket and state are absolute paths")
            }
            Self { metrics, socket, .. }
                if metrics.starts_with('/') && Path::new(metrics).parent() == socket.parent() =>
            {
                Err("metrics and socket are in different directories: containers see the socket's")
            }
            Self { metrics, .. }
                if !(metrics.is_empty()
                    || metrics.starts_with('/')
                    || metrics.parse::<SocketAddr>().is_ok()) =>
            {
                Err("metrics is an address with its port, or an absolute path")
            }
            _ => Ok(()),
        };
        fault.map_err(str::to_owned).and_then(|()| self.check_classes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shipped_file_has_every_option_with_its_default() {
        let shipped = include_str!("../dist/agent.toml");
        let example = |table: &str| {
            let (_, lines) = shipped.split_once(&format!("#\n# {table}\n")).expect("an example");
            let lines = lines.split("\n\n").next().unwrap_or_default();
            let lines = format!("{table}\n{}", format!("\n{lines}").replace("\n# ", "\n"));
            toml::from_str::<Config>(&lines).expect("it is read")
        };
        let class = example("[[class]]").classes.remove(0);
        assert_eq!(example("[[uplink]]").uplinks[0].interface, "ens1");
        class_has_each_option(&class);
        assert_eq!(toml::from_str::<Config>(shipped).expect("it is read"), Config::default());
        let options = ["socket", "state", "guardian", "ports_max", "ring_mib_max"];
        let more = ["ring_mib_total", "containers_expected", "ring_frames_max"];
        let others = [
            "requests_per_second",
            "captures_max",
            "self_administered",
            "other_ways_out",
            "default_policy",
            "log",
            "metrics",
        ];
        for option in options.iter().chain(&more).chain(&others) {
            assert!(shipped.contains(&format!("\n{option} = ")), "{option}");
        }
    }

    #[test]
    fn the_manifests_file_is_one() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/kubernetes/agent.toml");
        let uplinks = Config::read(&path).expect("it is read").uplinks;
        assert_eq!((uplinks.len(), &*uplinks[0].interface), (1, "ens1"));
    }

    fn class_has_each_option(class: &Class) {
        let Class { name, containers, engines, networks, .. } = class;
        assert_eq!(
            (name.as_str(), containers.len(), engines.len(), networks.len()),
            ("batch", 2, 1, 2)
        );
        let Class { backends, ports_max, ring_mib_max, .. } = class;
        assert!(backends.is_some() && ports_max.is_some() && ring_mib_max.is_some());
        assert!(class.ring_frames_max.is_some() && class.requests_per_second.is_some());
        assert!(class.ingress_rate.is_some() && class.egress_rate.is_some());
        assert!(class.uplink_rate.is_some() && class.uplink_ceil.is_some());
        let limits = "hca_handle=8 hca_object=2000 mr_bytes=4294967296";
        assert_eq!(class.rdma_max.to_string(), limits);
        assert_eq!(class.rdma_exceeded, crate::quota::RdmaExceeded::Report);
    }

    #[test]
    fn all_ports_take_a_quarter_of_the_memory_at_most() {
        let total = |ring_mib_total| Config { ring_mib_total, ..Config::default() };
        let meminfo = fs::read_to_string("/proc/meminfo").expect("a table");
        let line = meminfo.lines().find_map(|l| l.strip_prefix("MemTotal:")).expect("a line");
        let kib: usize = line.trim().trim_end_matches(" kB").parse().expect("a number");
        assert_eq!(total(1).ring_bytes_total(), 1 << 20);
        assert_eq!(total(1 << 30).ring_bytes_total() >> 10, kib / 4);
    }

    #[test]
    fn a_running_agent_takes_over_what_can_change() {
        let old = Config::default();
        let mut fresh = Config {
            socket: "/a/b".into(),
            state: "/c/d".into(),
            guardian: PathBuf::new(),
            ports_max: 1,
            ring_mib_max: 2,
            ring_mib_total: 3,
            containers_expected: 6,
            ring_frames_max: 4,
            requests_per_second: 5,
            captures_max: 0,
            self_administered: SelfAdministered::Refuse,
            other_ways_out: OtherWaysOut::Accept,
            default_policy: DefaultPolicy::Claimed,
            log: LogLevel::Error,
            classes: vec![Class::default()],
            metrics: "[::1]:9479".into(),
            uplinks: vec![Uplink { interface: "eth0".into(), rate: "1g".parse().unwrap() }],
        };
        assert_eq!(fresh.differences(&old).len(), 17);
        assert_eq!(fresh.keep(&old), ["socket", "state", "guardian", "metrics"]);
        assert_eq!((&fresh.socket, &fresh.state), (&old.socket, &old.state));
        let changed = fresh.differences(&old);
        assert_eq!(changed.len(), 13, "{changed:?}");
        assert_eq!((fresh.keep(&old), changed[0], changed[12]), (vec![], "ports_max", "uplink"));
        assert!(old.differences(&Config::default()).is_empty());
    }

    #[test]
    fn what_makes_no_sense_is_named() {
        let dir = std::env::temp_dir().join(format!("agent-config-{}", std::process::id()));
        for (text, named) in [
            ("prots_max = 3", "prots_max"),
            ("self_administered = \"perhaps\"", "perhaps"),
            ("other_ways_out = \"perhaps\"", "perhaps"),
            ("default_policy = \"perhaps\"", "perhaps"),
            ("log = \"loud\"", "loud"),
            ("requests_per_second = 0", "requests_per_second"),
            ("ring_frames_max = 0", "ring_frames_max"),
            ("ports_max = -1", "ports_max"),
            ("ports_max = 0", "ports_max"),
            ("ring_mib_max = 0", "ring_mib_max"),
            ("ring_mib_total = 0", "ring_mib_total"),
            ("containers_expected = 0", "containers_expected"),
            ("socket = \"/run/a/b\"\nstate = \"/run/a/c\"", "different directories"),
            ("socket = \"a/b\"", "absolute"),
            ("state = \"/run/a/control.json\"", "control.sock"),
            ("state = \"/run/a/counters\"", "counters.json"),
            ("metrics = \"9479\"", "absolute path"),
            ("metrics = \"localhost:9479\"", "absolute path"),
            ("metrics = \"/run/rocinante/metrics.sock\"", "different directories"),
            ("=", "line 1"),
            ("[[class]]\nprots_max = 3", "prots_max"),
            ("[[class]]\nports_max = 3", "class \"\": a name has"),
            ("[[class]]\nname = \"a b\"", "class \"a b\": a name has"),
            ("[[class]]\nname = \"a\"\n[[class]]\nname = \"a\"", "two classes are called \"a\""),
            ("[[class]]\nname = \"default\"\nengines = [\"x\"]", "matches nothing itself"),
            ("[[class]]\nname = \"a\"\nbackends = [\"packet\", \"udp\"]", "udp"),
            ("[[class]]\nname = \"a\"\nbackends = []", "at least one"),
            ("[[class]]\nname = \"a\"\nports_max = 0", "class \"a\": ports_max is at least 1"),
            ("[[class]]\nname = \"a\"\nring_mib_max = 0", "ring_mib_max is"),
            ("[[class]]\nname = \"a\"\nring_frames_max = 0", "ring_frames_max is"),
            ("[[class]]\nname = \"a\"\nrequests_per_second = 0", "requests_per_second is"),
            ("[[class]]\nname = \"a\"\nnetworks = [\"10.0.0.0/33\"]", "line 3"),
            ("[[class]]\nname = \"a\"\nnetworks = [\"10.0.0.1\"]", "line 3"),
            ("class = 7", "line 1"),
            ("[[class]]\nname = \"a\"\nuplink_ceil = \"2g\"", "uplink_rate beside it"),
            ("[[class]]\nname = \"a\"\nuplink_rate = \"3g\"\nuplink_ceil = \"2g\"", "at least"),
            ("[[uplink]]\ninterface = \"a\"", "rate"),
            ("[[uplink]]\ninterface = \"\"\nrate = \"2g\"", "1 to 15"),
            (
                "[[uplink]]\ninterface = \"a\"\nrate = \"2g\"\n\
                 [[uplink]]\ninterface = \"a\"\nrate = \"2g\"",
                "two uplinks are \"a\"",
            ),
            (
                "[[uplink]]\ninterface = \"a\"\nrate = \"2g\"\n\
                 [[class]]\nname = \"b\"\nuplink_rate = \"3g\"",
                "class \"b\": uplink_rate is more than \"a\" has",
            ),
            ("[[class]]\nname = \"a\"\nrdma_max = \"hca_qp=1\"", "hca_qp=1"),
            ("[[class]]\nname = \"a\"\nrdma_exceeded = \"perhaps\"", "perhaps"),
            ("[[class]]\nname = \"a\"\negress_rate = \"0\"", "1mbit to 1tbit"),
            ("[[class]]\nname = \"a\"\negress_rate = \"5 MB/s\"", "500mbit"),
            ("[[class]]\nname = \"a\"\ningress_rate = 999999", "999.999kbit"),
            ("[[class]]\nname = \"a\"\ningress_rate = true", "a rate such as"),
        ] {
            std::fs::write(&dir, text).expect("written");
            let error = Config::read(&dir).expect_err(text).to_string();
            assert!(error.contains(named), "{text}: {error}");
        }
        std::fs::remove_file(&dir).expect("removed");
        let error = Config::read(&dir).expect_err("no file").to_string();
        assert!(error.contains("No such file"), "{error}");
    }
}
