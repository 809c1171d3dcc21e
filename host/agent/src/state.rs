//! The state: the facts that a restarted agent cannot read from the kernel. One file on a tmpfs,
//! written to another name and renamed, so that it is whole or not there.
//!
//! The rules in force are in the kernel: the programs at the hosts' ends and their addresses. So a
//! file that is lost, cut, of another boot or another agent costs little: containers whose
//! addresses were fixed or followed have from then on those that the kernel knows, and stay open or
//! closed where claims decide; ports that are held lose the guard of their rings.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::net::IpAddr;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use rocinante_netdev::handed::Ring;
use serde::{Deserialize, Serialize};

use crate::called::Called;
use crate::claims::{Claim, Claimed};
use crate::host::Rates;

const VERSION: u32 = 1;
/// The longest file that is read.
const BYTES_MAX: u64 = 16 << 20;

/// The content.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct State {
    version: u32,
    /// The boot of the machine that it is of.
    boot: String,
    /// The agent's network namespace.
    namespace: u64,
    pub(crate) containers: Vec<Known>,
    /// The claims of pods.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) claims: Vec<Claim>,
}

/// A container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Known {
    /// The index of the host's end.
    pub(crate) host_end: u32,
    /// The index of the container's end, in its namespace.
    pub(crate) interface: u32,
    /// The inode of its network namespace.
    pub(crate) namespace: u64,
    /// Its addresses, if they do not follow those of the namespace.
    pub(crate) fixed: Option<Fixed>,
    /// An engine's word about it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) introduced: Option<Introduced>,
    /// Its name by the control group of the last process that asked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) called: Option<Called>,
    pub(crate) ports: Vec<KnownPort>,
}

/// The addresses that a container has for good.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Fixed {
    pub(crate) mac: [u8; 6],
    pub(crate) addresses: Vec<IpAddr>,
}

/// An engine's word about a container before it ran.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Introduced {
    #[serde(flatten)]
    pub(crate) called: Called,
    /// The class that the engine named.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) class: Option<String>,
    /// Rates of its own, beside those of its class.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) rates: Option<Rates>,
    /// The UID of its pod, and what the pod's claims say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) pod: Option<String>,
    #[serde(default, skip_serializing_if = "Claimed::is_none")]
    pub(crate) claimed: Claimed,
    /// The addresses that the engine gave it.
    pub(crate) given: Fixed,
}

/// The ports of one answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct KnownPort {
    /// The inodes of the sockets.
    pub(crate) sockets: Vec<u64>,
    /// The geometry of each receive ring; ports of `afxdp` have none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) ring: Option<Ring>,
    /// Bytes of memory that the kernel keeps for them.
    #[serde(default)]
    pub(crate) bytes: usize,
    /// Slots of each receive ring, of `afxdp` chunks.
    #[serde(default)]
    pub(crate) slots: u32,
}

/// Where the state is.
#[derive(Debug)]
pub(crate) struct StateFile {
    path: PathBuf,
    boot: String,
    namespace: u64,
    /// The directory, locked as long as this agent runs.
    _lock: File,
}

impl StateFile {
    /// The state at `path`, of an agent in the network namespace with this inode. Makes the
    /// directory if it is not there. Error: another agent has it; or the directory is another
    /// user's, or cannot be made.
    pub(crate) fn open(path: &Path, namespace: u64) -> io::Result<Self> {
        let directory = path.parent().filter(|d| !d.as_os_str().is_empty());
        let directory = directory.ok_or(io::ErrorKind::InvalidInput)?;
        if !directory.exists() {
            fs::create_dir_all(directory)?;
            fs::set_permissions(directory, std::os::unix::fs::PermissionsExt::from_mode(0o700))?;
        }
        let lock = File::open(directory)?;
        let meta = lock.metadata()?;
        if !meta.is_dir()
            || meta.uid() != rustix::process::geteuid().as_raw()
            || meta.mode() & 0o022 != 0
        {
            let what = "the directory of the state is not this user's alone";
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, what));
        }
        rustix::fs::flock(&lock, rustix::fs::FlockOperation::NonBlockingLockExclusive)
            .map_err(|_| io::Error::new(io::ErrorKind::AddrInUse, "another agent runs there"))?;
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned();
        Ok(Self { path: path.to_owned(), boot, namespace, _lock: lock })
    }

    /// The state that an earlier agent of this namespace wrote since the machine started. Error:
    /// why it is not used. Without a file there is none.
    pub(crate) fn read(&self) -> Result<State, String> {
        let flags = rustix::fs::OFlags::NOFOLLOW.bits().cast_signed();
        let file = OpenOptions::new().read(true).custom_flags(flags).open(&self.path);
        let file = match file {
            Ok(file) => file,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(self.empty()),
            Err(e) => return Err(e.to_string()),
        };
        let meta = file.metadata().map_err(|e| e.to_string())?;
        if !meta.is_file() || meta.uid() != rustix::process::geteuid().as_raw() {
            return Err("it is not this user's file".into());
        }
        let mut text = String::new();
        file.take(BYTES_MAX).read_to_string(&mut text).map_err(|e| e.to_string())?;
        let state: State = serde_json::from_str(&text).map_err(|e| e.to_string())?;
        if state.version != VERSION {
            return Err(format!("it has version {}, not {VERSION}", state.version));
        }
        if state.boot != self.boot {
            return Err("it is from before the machine started".into());
        }
        if state.namespace != self.namespace {
            return Err("it is of an agent in another network namespace".into());
        }
        Ok(state)
    }

    /// Writes these containers and claims. Error: no room, or no right: the old file stays.
    pub(crate) fn write(&self, containers: Vec<Known>, claims: Vec<Claim>) -> io::Result<()> {
        let state = State { containers, claims, ..self.empty() };
        let text = serde_json::to_vec(&state).map_err(io::Error::other)?;
        replace(&self.path, &text)
    }

    fn empty(&self) -> State {
        State {
            version: VERSION,
            boot: self.boot.clone(),
            namespace: self.namespace,
            containers: Vec::new(),
            claims: Vec::new(),
        }
    }
}

/// Puts a file in the place of the one at `path`, in a directory of this user's alone. Error: no
/// room, or no right: the old file stays.
pub(crate) fn replace(path: &Path, text: &[u8]) -> io::Result<()> {
    let fresh = path.with_extension("new");
    match fs::remove_file(&fresh) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&fresh)?;
    file.write_all(text)?;
    fs::rename(&fresh, path)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn directory(name: &str) -> PathBuf {
        let dir = std::env::temp_dir().join(format!("agent-state-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&dir);
        dir
    }

    fn known(host_end: u32) -> Known {
        let fixed = Fixed { mac: [2, 0, 0, 0, 0, 1], addresses: vec!["fd00::1".parse().unwrap()] };
        let ring = Ring { block_bytes: 4096, blocks: 1, frame_bytes: 2048, frames: 2 };
        let ports = vec![
            KnownPort { sockets: vec![7, 8], ring: Some(ring), bytes: 1 << 20, slots: 2 },
            KnownPort { sockets: vec![9], ring: None, bytes: 1 << 21, slots: 64 },
        ];
        let given = fixed.clone();
        let called = Called { id: "0123".into(), engine: "libpod".into() };
        let class = Some("gold".into());
        let egress = "5mbit".parse().ok();
        let rates = Rates { egress, egress_burst_bits: Some(8), ..Rates::default() };
        let introduced = Introduced {
            called: called.clone(),
            class,
            rates: Some(rates),
            pod: Some("0f1e".into()),
            claimed: Claimed { class: Some("gold".into()), ..Claimed::default() },
            given,
        };
        Known {
            host_end,
            interface: 2,
            namespace: 4_026_531_840,
            fixed: Some(fixed),
            introduced: Some(introduced),
            called: Some(called),
            ports,
        }
    }

    #[test]
    fn what_was_written_is_read_whole_or_not_at_all() {
        let dir = directory("whole");
        let path = dir.join("state.json");
        let file = StateFile::open(&path, 7).expect("opened");
        assert_eq!(file.read().expect("there is none").containers, []);
        for containers in [vec![known(3), known(4)], vec![], vec![known(5)]] {
            file.write(containers.clone(), Vec::new()).expect("written");
            assert_eq!(file.read().expect("read").containers, containers);
        }
        let text = fs::read(&path).expect("the file");
        for cut in [0, 1, text.len() / 2, text.len() - 1] {
            fs::write(&path, &text[..cut]).expect("cut");
            assert!(file.read().is_err(), "cut at {cut}");
        }
        // A file that an agent left when it was killed while writing.
        fs::write(path.with_extension("new"), "{").expect("written");
        file.write(vec![known(6)], Vec::new()).expect("written");
        assert_eq!(file.read().expect("read").containers, [known(6)]);
        fs::remove_dir_all(&dir).expect("removed");
    }

    /// Agents of other versions take over from each other: fields that one does not know are passed
    /// over, and those that one did not write are as if there were nothing.
    #[test]
    fn the_state_of_an_older_and_of_a_newer_agent_is_read() {
        let dir = directory("versions");
        let path = dir.join("state.json");
        let file = StateFile::open(&path, 7).expect("opened");
        let ring = r#"{"block_bytes": 4096, "blocks": 1, "frame_bytes": 2048, "frames": 2}"#;
        let written = |more: &str, of_port: &str| {
            let ports = format!(r#"[{{"sockets": [7], "ring": {ring}{of_port}}}]"#);
            let container = format!(
                r#"{{"host_end": 3, "interface": 2, "namespace": 5, "fixed": null, "ports": {ports}{more}}}"#
            );
            let boot = &file.boot;
            format!(
                r#"{{"version": 1, "boot": {boot:?}, "namespace": 7, "containers": [{container}]}}"#
            )
        };
        fs::write(&path, written("", "")).expect("written");
        let old = file.read().expect("read").containers;
        assert_eq!((old[0].host_end, &old[0].introduced), (3, &None));
        assert_eq!((old[0].ports[0].bytes, old[0].ports[0].slots), (0, 0));
        let class = r#", "class": {"name": "gold", "rate": [1, 2]}"#;
        fs::write(&path, written(class, r#", "counters": null"#)).expect("written");
        assert_eq!(file.read().expect("read").containers, old);
        fs::remove_dir_all(&dir).expect("removed");
    }

    #[test]
    fn the_file_of_another_boot_or_agent_is_not_used() {
        let dir = directory("others");
        let path = dir.join("state.json");
        let file = StateFile::open(&path, 7).expect("opened");
        file.write(vec![known(3)], Vec::new()).expect("written");
        let text = fs::read_to_string(&path).expect("the file");
        for (from, to) in [
            ("\"version\":1", "\"version\":2"),
            ("\"namespace\":7", "\"namespace\":8"),
            (file.boot.as_str(), "00000000-0000-0000-0000-000000000000"),
        ] {
            fs::write(&path, text.replacen(from, to, 1)).expect("written");
            file.read().expect_err(to);
        }
        // Another's file, by a link in its place.
        fs::remove_file(&path).expect("removed");
        std::os::unix::fs::symlink("/proc/version", &path).expect("a link");
        file.read().expect_err("a link");
        fs::remove_dir_all(&dir).expect("removed");
    }

    #[test]
    fn one_agent_at_a_time() {
        let dir = directory("lock");
        let path = dir.join("state.json");
        let first = StateFile::open(&path, 7).expect("opened");
        let error = StateFile::open(&path, 7).expect_err("locked");
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
        drop(first);
        StateFile::open(&path, 7).expect("opened");
        let open = std::os::unix::fs::PermissionsExt::from_mode(0o777);
        fs::set_permissions(&dir, open).expect("set");
        let error = StateFile::open(&path, 7).expect_err("anybody may write there");
        assert_eq!(error.kind(), io::ErrorKind::PermissionDenied);
        fs::remove_dir_all(&dir).expect("removed");
    }
}
