//! The figures of processes of the same user, from the pages that their devices publish in: memory
//! files among their descriptors, which takes no right.

use std::collections::{BTreeMap, HashSet};
use std::fs::{self, File, OpenOptions};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use rocinante_netdev::handed::page::{
    self, LINKS, Ledger, NO_LIMIT, RESOURCES, Reading, SERVICES, STATES,
};
use rustix::fs::{Mode, OFlags, open};

use super::{Container, Limit, QueuePair, unknown};
use crate::output::{Failure, Result};
use crate::policy::live::place_of;

/// Pages and ledgers that are read: any user may make them without end.
const FOUND_MAX: usize = 16_384;

/// A page of a process. Several may have its descriptor.
struct Found {
    /// Of the memory file.
    inode: u64,
    /// The file, which is not open: of another kind, that might not end.
    held: OwnedFd,
    is_ledger: bool,
}

impl Found {
    fn path(&self) -> PathBuf {
        own("fd", &self.held)
    }
}

/// The containers of the processes that this one may look at, or the one that `name` means. Error:
/// there is none of this name.
pub(super) fn look(name: Option<&str>, qps: bool) -> Result<Vec<Container>> {
    let wanted = match name {
        Some(name) => Some(namespace(name).ok_or_else(|| {
            unknown(
                name,
                "without an agent, name a process in it, a name of `ip netns`, or net:[N]",
            )
        })?),
        None => None,
    };
    let of_memory = mount_of_memory()?;
    let mut containers = BTreeMap::<u64, Container>::new();
    let mut seen = HashSet::new();
    for process in processes() {
        let Some(at) = inode_of(&process.join("ns/net")) else { continue };
        if wanted.is_some_and(|wanted| wanted != at) {
            continue;
        }
        for found in found_in(&process, of_memory) {
            if seen.len() == FOUND_MAX || !seen.insert(found.inode) {
                continue;
            }
            let container = containers.entry(at).or_insert_with(|| Container {
                name: format!("net:[{at}]"),
                place: Some(process.join("ns/net")),
                ..Container::default()
            });
            match found.is_ledger {
                true => container.add_limits(&found.path()),
                false => container.add_page(&found, qps),
            }
        }
    }
    Ok(containers.into_values().collect())
}

fn namespace(name: &str) -> Option<u64> {
    let inode = name.strip_prefix("net:[").and_then(|rest| rest.strip_suffix(']'));
    inode.map_or_else(|| inode_of(&place_of(name)), |inode| inode.parse().ok())
}

fn inode_of(path: &Path) -> Option<u64> {
    fs::metadata(path).ok().map(|file| file.ino())
}

fn processes() -> impl Iterator<Item = PathBuf> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let is_one = |name: &str| name.bytes().all(|byte| byte.is_ascii_digit());
    entries.filter(move |it| it.file_name().to_str().is_some_and(is_one)).map(|it| it.path())
}

/// The pages and ledgers among the descriptors of a process. A file of another mount may have such
/// a name: `of_memory` is the mount of memory files.
fn found_in(process: &Path, of_memory: u64) -> impl Iterator<Item = Found> {
    let entries = fs::read_dir(process.join("fd")).into_iter().flatten().flatten();
    entries.filter_map(move |entry| {
        let held = open(entry.path(), OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).ok()?;
        let path = own("fd", &held);
        let link = fs::read_link(&path).ok()?;
        let kind = LINKS.iter().position(|name| Path::new(name) == link)?;
        mount_of(&held).filter(|mount| *mount == of_memory)?;
        Some(Found { inode: inode_of(&path)?, held, is_ledger: kind == 1 })
    })
}

/// The mount of all memory files. Error: no descriptor is left, or there is no /proc.
fn mount_of_memory() -> Result<u64> {
    let memory = page::make().map_err(|error| Failure::Failed(format!("memfd_create: {error}")))?;
    mount_of(&memory).ok_or_else(|| {
        Failure::Failed("/proc cannot be read: mount it, as in `mount -t proc none /proc`".into())
    })
}

/// The file of a descriptor of this process in a directory of /proc.
fn own(directory: &str, fd: &impl AsRawFd) -> PathBuf {
    format!("/proc/self/{directory}/{}", fd.as_raw_fd()).into()
}

/// The mount of a descriptor's file.
fn mount_of(fd: &impl AsRawFd) -> Option<u64> {
    let text = fs::read_to_string(own("fdinfo", fd)).ok()?;
    text.lines().find_map(|line| line.strip_prefix("mnt_id:")?.trim().parse().ok())
}

impl Container {
    fn add_page(&mut self, found: &Found, qps: bool) {
        let Ok(file) = File::open(found.path()) else { return };
        let Some(Reading { head, counters, .. }) = page::read(&file) else {
            self.unread += usize::from(page::is_begun(&file));
            return;
        };
        let key = found.inode.to_string();
        self.backends.push(head.backend);
        let counters = counters.iter().map(|(name, count)| (name.to_owned(), count)).collect();
        self.counters.insert(key.clone(), counters);
        if qps {
            let all = page::queue_pairs(&file).into_iter();
            self.queue_pairs.extend(all.map(|qp| ((key.clone(), qp.numbers[0]), qp.into())));
        }
    }

    fn add_limits(&mut self, path: &Path) {
        let file = OpenOptions::new().read(true).write(true).open(path);
        let Ok(ledger) = file.and_then(|file| Ledger::open(&file)) else { return };
        let current = ledger.usage().current;
        let all = RESOURCES.iter().zip(current).zip(ledger.limits());
        let limited = all.filter(|(_, max)| *max != NO_LIMIT);
        self.limits = limited
            .map(|((name, current), max)| Limit {
                name: (*name).to_owned(),
                current: Some(current),
                max,
            })
            .collect();
    }
}

impl From<page::QueuePair> for QueuePair {
    fn from(qp: page::QueuePair) -> Self {
        let name = |names: &[&str], number: u8| {
            names.get(usize::from(number)).copied().unwrap_or_default().to_owned()
        };
        Self {
            peer: qp.peer,
            peer_number: qp.numbers[1],
            service: name(&SERVICES, qp.service),
            state: name(&STATES, qp.state),
            sent_bytes: qp.sent[1],
            received_bytes: qp.received[1],
            repeated: qp.repeated,
            not_ready: qp.not_ready,
            requests: qp.requests,
            held: qp.held,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Any process may have a file of such a name in its root directory, and others in `/`.
    #[test]
    fn a_file_that_is_called_as_a_page_is_none() {
        let of_memory = mount_of_memory().expect("a memory file");
        let process = Path::new("/proc/self");
        let page = page::make().expect("a page");
        let inode = File::from(page.try_clone().expect("a copy")).metadata().expect("it").ino();
        let is_found =
            |mount| found_in(process, mount).any(|it| it.inode == inode && !it.is_ledger);
        assert!(is_found(of_memory));
        let exe = File::open("/proc/self/exe").expect("this program");
        let other = mount_of(&exe).expect("a mount");
        assert_ne!(other, of_memory);
        assert!(!is_found(other));
    }
}
