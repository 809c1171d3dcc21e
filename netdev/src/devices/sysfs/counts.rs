//! The counters of a port, of all processes of a user together.
//!
//! A process that has opened a device listens on a socket in a directory that the user's processes
//! share. To connect to it is to ask: the process writes its counters to a file beside the socket,
//! and closes the connection. So counting costs nothing until a program looks. The counters of a
//! process that is gone are added to a file of the port: by itself, or by the next one that asks,
//! from the last answer.

use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

use super::files::{hold, make, own};
use crate::kernel::descriptors::network_namespace;
use crate::kernel::inherited::noted;
use crate::tuning::sysfs::{ANSWER_PATIENCE, PAST_MAX};

/// The counters of a port by their paths there: `counters/port_xmit_data`.
pub type Counts = BTreeMap<String, u64>;

/// Where the last answers and the sockets are, and the counters of the processes that are gone.
const LIVE: &str = "live";
const PAST: &str = "past";

/// A port: an interface of a network namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PortKey {
    /// Number of the namespace.
    pub namespace: u64,
    /// Index of the interface.
    pub index: u32,
}

impl PortKey {
    /// The interface of the calling thread's namespace with this index. Error: no descriptor is
    /// left, or the kernel does not tell.
    pub fn of(index: u32) -> io::Result<Self> {
        Ok(Self { namespace: network_namespace()?, index })
    }
}

type Ports = HashMap<PortKey, Counts>;

/// The end of the socket that answers.
#[derive(Debug)]
pub struct Published {
    place: PathBuf,
    name: String,
    listener: UnixListener,
}

impl Published {
    /// Listens for questions, for a process of the devices with this directory. Error: the
    /// directory is another user's, or no descriptor is left.
    pub fn begin(root: &Path) -> io::Result<Self> {
        let place = place_of(root)?;
        own(place.parent().unwrap_or(&place))?;
        let live = place.join(LIVE);
        make(&live)?;
        make(&place.join(PAST))?;
        // Numbers of processes are not the same in each namespace of those.
        for attempt in 0.. {
            let name = format!("{}-{attempt}", std::process::id());
            match bind(&live, &name) {
                Ok(listener) => {
                    let listener = UnixListener::from(noted(listener.into()));
                    return Ok(Self { place, name, listener });
                }
                Err(error) if error.kind() == io::ErrorKind::AddrInUse && attempt < 100 => {}
                Err(error) => return Err(error),
            }
        }
        Err(io::ErrorKind::AddrInUse.into())
    }

    /// Waits for a question. The connection is to be closed when the answer is there. Error: no
    /// descriptor is left.
    pub fn asked(&self) -> io::Result<UnixStream> {
        self.listener.accept().map(|(stream, _)| stream)
    }

    /// Answers with the counters of these ports. Error: the directory is gone, or full.
    pub fn answer<'a>(
        &self,
        ports: impl IntoIterator<Item = (PortKey, &'a Counts)>,
    ) -> io::Result<()> {
        let draft = self.place.join(LIVE).join(format!(".{}", self.name));
        fs::write(&draft, text_of(ports))?;
        fs::rename(&draft, answer_of(&self.place, &self.name))
    }

    /// The process ends: the last answer has its final counters.
    pub fn end(&self) {
        let _held = hold(&self.place);
        retire(&self.place, &self.name);
    }
}

/// The counters of the processes with this directory, and of all others of its user.
pub(super) fn sum(root: &Path) -> Ports {
    let mut sums = Ports::new();
    let Ok(place) = place_of(root) else { return sums };
    let _held = hold(&place);
    for name in names_in(&place.join(LIVE)).into_iter().filter(|name| !name.contains('.')) {
        if ask(&place.join(LIVE), &name) {
            add(&mut sums, &read(&answer_of(&place, &name)));
        } else {
            retire(&place, &name);
        }
    }
    for name in names_in(&place.join(PAST)) {
        add(&mut sums, &read(&place.join(PAST).join(name)));
    }
    sums
}

/// Removes what no process will ask for: counters of an earlier boot, and the oldest of many ports.
pub fn clean(root: &Path) {
    let (Ok(place), Some(above)) = (place_of(root), root.parent()) else { return };
    for name in names_in(above) {
        if name.starts_with(PLACE) && !place.ends_with(&name) {
            let _ = fs::remove_dir_all(above.join(name));
        }
    }
    let changed = |path: &PathBuf| path.metadata().and_then(|file| file.modified());
    let past = names_in(&place.join(PAST)).into_iter().map(|name| place.join(PAST).join(name));
    let mut past: Vec<PathBuf> = past.collect();
    past.sort_by_key(|path| changed(path).unwrap_or(SystemTime::UNIX_EPOCH));
    let many = past.len().saturating_sub(PAST_MAX);
    past.iter().take(many).for_each(|path| drop(fs::remove_file(path)));
}

const PLACE: &str = "counters-";

/// The directory that the processes of a user share, until the next boot: numbers of namespaces
/// begin anew then.
fn place_of(root: &Path) -> io::Result<PathBuf> {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    let above = root.parent().ok_or(io::ErrorKind::NotFound)?;
    Ok(above.join(format!("{PLACE}{}", boot.trim())))
}

fn answer_of(place: &Path, name: &str) -> PathBuf {
    place.join(LIVE).join(format!("{name}.counts"))
}

/// By way of the directory's descriptor: the address of a socket has room for 108 bytes.
fn by_descriptor<T>(
    directory: &Path,
    name: &str,
    then: impl FnOnce(&Path) -> io::Result<T>,
) -> io::Result<T> {
    let directory = File::open(directory)?;
    then(Path::new(&format!("/proc/self/fd/{}/{name}", directory.as_raw_fd())))
}

fn bind(live: &Path, name: &str) -> io::Result<UnixListener> {
    by_descriptor(live, name, |path| UnixListener::bind(path))
}

/// Has a process answer. `false` if it is gone.
fn ask(live: &Path, name: &str) -> bool {
    match by_descriptor(live, name, connect_at_once) {
        Ok(mut stream) => {
            let _ = stream.set_nonblocking(false);
            let _ = stream.set_read_timeout(Some(ANSWER_PATIENCE));
            let _ = stream.read(&mut [0]);
            true
        }
        // The queue of a stopped process may be full.
        Err(error) => error.kind() != io::ErrorKind::ConnectionRefused,
    }
}

/// Connects without waiting for a place in the queue.
fn connect_at_once(path: &Path) -> io::Result<UnixStream> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket.into())
}

/// Adds the last answer of a process to its port's file.
fn retire(place: &Path, name: &str) {
    let answer = answer_of(place, name);
    for (port, counts) in read(&answer) {
        let path = place.join(PAST).join(format!("{}-{}", port.namespace, port.index));
        let mut sums = read(&path);
        add(&mut sums, &Ports::from([(port, counts)]));
        let draft = place.join(format!(".{}", std::process::id()));
        let sums = text_of(sums.iter().map(|(port, counts)| (*port, counts)));
        let _ = fs::write(&draft, sums).and_then(|()| fs::rename(&draft, &path));
    }
    let _ = fs::remove_file(answer);
    let _ = fs::remove_file(place.join(LIVE).join(name));
}

fn add(sums: &mut Ports, more: &Ports) {
    for (port, counts) in more {
        let sums = sums.entry(*port).or_default();
        for (name, count) in counts {
            let sum = sums.entry(name.clone()).or_default();
            *sum = sum.wrapping_add(*count);
        }
    }
}

/// A line for each counter.
fn text_of<'a>(ports: impl IntoIterator<Item = (PortKey, &'a Counts)>) -> Vec<u8> {
    let mut text = Vec::new();
    for (PortKey { namespace, index }, counts) in ports {
        for (name, count) in counts.iter().filter(|(_, count)| **count > 0) {
            let _ = writeln!(text, "{namespace} {index} {name} {count}");
        }
    }
    text
}

fn read(path: &Path) -> Ports {
    let mut ports = Ports::new();
    for line in fs::read_to_string(path).unwrap_or_default().lines() {
        let mut words = line.split(' ');
        let mut word = || words.next().unwrap_or_default();
        let (namespace, index, name, count) = (word(), word(), word(), word());
        if let (Ok(namespace), Ok(index), Ok(count)) =
            (namespace.parse(), index.parse(), count.parse())
        {
            let port = ports.entry(PortKey { namespace, index }).or_default();
            port.insert(name.to_owned(), count);
        }
    }
    ports
}

fn names_in(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().into_string().ok()).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;
    use crate::kernel::inherited::tests::beside_a_child;

    #[test]
    fn a_process_that_is_gone_is_not_asked_while_a_child_of_it_lives() {
        let place = tempfile::TempDir::new().unwrap();
        let root = place.path().join("root");
        fs::create_dir_all(&root).unwrap();
        let parent = Published::begin(&root).unwrap();
        let (live, name) = (parent.place.join(LIVE), parent.name.clone());
        beside_a_child(|| {
            drop(parent);
            assert!(!ask(&live, &name));
        });
    }

    #[test]
    fn a_stopped_process_whose_queue_is_full_counts_by_its_last_answer() {
        let place = tempfile::TempDir::new().unwrap();
        let root = place.path().join("root");
        fs::create_dir_all(&root).unwrap();
        let stopped = Published::begin(&root).unwrap();
        let (port, name) = (PortKey { namespace: 7, index: 2 }, "counters/port_xmit_data");
        stopped.answer([(port, &Counts::from([(name.to_owned(), 40)]))]).unwrap();
        let live = stopped.place.join(LIVE);
        let put = || by_descriptor(&live, &stopped.name, connect_at_once);
        let full = (0..100_000).find_map(|_| put().err()).expect("the queue has an end");
        assert_eq!(full.kind(), io::ErrorKind::WouldBlock);
        let (send, sums) = mpsc::channel();
        std::thread::spawn(move || send.send(sum(&root)));
        let sums = sums.recv_timeout(Duration::from_secs(20)).expect("it waits for ever");
        assert_eq!(sums[&port][name], 40);
    }
}
