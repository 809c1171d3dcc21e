//! `bpf(2)`: maps, programs, their attachments and test runs. The kernel takes a prefix of `union
//! bpf_attr` and treats the rest as zero.
#![allow(unsafe_code)]

pub mod asm;
mod attr;

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use self::asm::Insn;
use self::attr::*;
pub use self::attr::{TCX_DROP, TCX_NEXT};
use crate::kernel::inherited;
use crate::tuning::reading::{KEYS_MAX, MAPS_MAX, PROGRAMS_MAX};

/// A BPF map, shared with the program.
#[derive(Debug)]
pub struct Map {
    fd: OwnedFd,
    key_size: usize,
    value_size: usize,
}

impl Map {
    /// A hash of `entries` keys of `key_size` bytes to a `u32`.
    pub fn hash(name: &str, key_size: usize, entries: u32) -> io::Result<Self> {
        Self::create(MAP_TYPE_HASH, name, key_size, entries)
    }

    /// An array of `entries` numbers.
    pub fn numbers(name: &str, entries: u32) -> io::Result<Self> {
        Self::create(MAP_TYPE_ARRAY, name, size_of::<u32>(), entries)
    }

    /// An array of `entries` counters of 64 bits, for [`count`](Self::count).
    pub fn counters(name: &str, entries: u32) -> io::Result<Self> {
        Self::create_with(MAP_TYPE_ARRAY, 0, name, (size_of::<u32>(), size_of::<u64>()), entries)
    }

    /// An array of AF_XDP sockets by receive queue.
    pub fn sockets(name: &str, entries: u32) -> io::Result<Self> {
        Self::create(MAP_TYPE_XSKMAP, name, size_of::<u32>(), entries)
    }

    /// A ring of `bytes` bytes, a power of two of pages, for records of a program. Needs `CAP_BPF`.
    pub fn records(name: &str, bytes: u32) -> io::Result<Self> {
        Self::create_with(MAP_TYPE_RINGBUF, 0, name, (0, 0), bytes)
    }

    /// A number of eight bytes that processes can map: [`is_shared_word`].
    pub fn shared_word(name: &str) -> io::Result<Self> {
        let sizes = (size_of::<u32>(), size_of::<u64>());
        Self::create_with(MAP_TYPE_ARRAY, F_MMAPABLE, name, sizes, 1)
    }

    /// Sets `key` (of the map's key size) to `value`.
    pub fn set(&self, key: &[u8], value: u32) -> io::Result<()> {
        self.change(MAP_UPDATE_ELEM, key, size_of_val(&value), (&raw const value) as u64)
    }

    /// The value of `key` (of the map's key size); `ENOENT` if it is not in the map.
    pub fn value(&self, key: &[u8]) -> io::Result<u32> {
        let mut value = 0u32;
        self.change(MAP_LOOKUP_ELEM, key, size_of_val(&value), (&raw mut value) as u64)?;
        Ok(value)
    }

    /// A counter of [`counters`](Self::counters).
    pub fn count(&self, index: u32) -> io::Result<u64> {
        let mut value = 0u64;
        let size = size_of_val(&value);
        self.change(MAP_LOOKUP_ELEM, &index.to_ne_bytes(), size, (&raw mut value) as u64)?;
        Ok(value)
    }

    /// All keys, in no order. Another thread or process that changes the map meanwhile may make
    /// keys appear twice or not at all.
    pub fn keys(&self) -> io::Result<Vec<Vec<u8>>> {
        let mut keys: Vec<Vec<u8>> = Vec::new();
        loop {
            let (map_fd, mut next) = (raw(&self.fd), vec![0_u8; self.key_size]);
            let key = keys.last().map_or(0, |key| key.as_ptr() as u64);
            let value = next.as_mut_ptr() as u64;
            match bpf(MAP_GET_NEXT_KEY, &MapElem { map_fd, pad: 0, key, value, flags: 0 }) {
                Ok(_) if keys.len() < KEYS_MAX => keys.push(next),
                Ok(_) => return Err(io::Error::from(io::ErrorKind::OutOfMemory)),
                Err(e) if e.raw_os_error() == Some(libc::ENOENT) => return Ok(keys),
                Err(e) => return Err(e),
            }
        }
    }

    /// Removes `key` (of the map's key size); `ENOENT` if it is not in the map.
    pub fn remove(&self, key: &[u8]) -> io::Result<()> {
        self.change(MAP_DELETE_ELEM, key, self.value_size, 0)
    }

    /// Whether keys and values have these sizes.
    pub fn has_sizes(&self, key: usize, value: usize) -> bool {
        (self.key_size, self.value_size) == (key, value)
    }

    fn change(&self, cmd: libc::c_long, key: &[u8], size: usize, value: u64) -> io::Result<()> {
        assert_eq!((key.len(), size), (self.key_size, self.value_size), "sizes");
        let (map_fd, key) = (raw(&self.fd), key.as_ptr() as u64);
        bpf(cmd, &MapElem { map_fd, pad: 0, key, value, flags: 0 }).map(|_| ())
    }

    /// The descriptor, for a program that uses the map.
    pub fn raw_fd(&self) -> i32 {
        self.fd.as_raw_fd()
    }

    /// The descriptor, for another process.
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    fn create(map_type: u32, map: &str, key_size: usize, entries: u32) -> io::Result<Self> {
        Self::create_with(map_type, 0, map, (key_size, size_of::<u32>()), entries)
    }

    fn create_with(
        map_type: u32,
        flags: u32,
        map: &str,
        (key_size, value_size): (usize, usize),
        entries: u32,
    ) -> io::Result<Self> {
        let attr = MapCreate {
            map_type,
            key_size: key_size as u32,
            value_size: value_size as u32,
            max_entries: entries,
            flags,
            inner_map_fd: 0,
            numa_node: 0,
            name: name(map),
        };
        Ok(Self { fd: bpf_fd(MAP_CREATE, &attr)?, key_size, value_size })
    }
}

/// A loaded program: for XDP, a classifier for tcx, or a socket's filter.
#[derive(Debug)]
pub struct Program(OwnedFd);

impl Program {
    /// Loads and verifies a program for [`attach`](Self::attach). If the verifier refuses, the
    /// error quotes the end of its log.
    pub fn load(prog: &str, code: &[Insn]) -> io::Result<Self> {
        Self::load_quoting(PROG_TYPE_XDP, (F_XDP_HAS_FRAGS, ATTACH_XDP), prog, code)
    }

    /// Likewise a filter of sockets, for `SO_ATTACH_BPF` of socket(7).
    pub fn load_filter(prog: &str, code: &[Insn]) -> io::Result<Self> {
        Self::load_quoting(PROG_TYPE_SOCKET_FILTER, (0, 0), prog, code)
    }

    /// Attaches to an interface until the link is dropped or the process ends in any way.
    pub fn attach(&self, ifindex: u32) -> io::Result<Link> {
        self.attach_by(ifindex, XDP_FLAGS_DRV_MODE)
    }

    /// Likewise where the driver has no XDP.
    #[cfg(test)]
    pub(crate) fn attach_generic(&self, ifindex: u32) -> io::Result<Link> {
        /// `XDP_FLAGS_SKB_MODE` of `if_link.h`.
        const SKB_MODE: u32 = 1 << 1;
        self.attach_by(ifindex, SKB_MODE)
    }

    fn attach_by(&self, ifindex: u32, flags: u32) -> io::Result<Link> {
        let (prog_fd, target_ifindex, attach_type) = (raw(&self.0), ifindex, ATTACH_XDP);
        let attr = LinkCreate { prog_fd, target_ifindex, attach_type, flags };
        bpf_fd(LINK_CREATE, &attr).map(Link)
    }

    /// Loads and verifies a program for [`attach_tcx`](Self::attach_tcx).
    pub fn load_classifier(prog: &str, code: &[Insn]) -> io::Result<Self> {
        Self::load_as(PROG_TYPE_SCHED_CLS, (0, 0), prog, code, &mut [])
    }

    /// Attaches a classifier to an interface, behind the programs that are there, until the link
    /// is dropped or the process ends in any way.
    pub fn attach_tcx(&self, ifindex: u32, ingress: bool) -> io::Result<Link> {
        let (prog_fd, attach_type) = (raw(&self.0), tcx_hook(ingress));
        bpf_fd(LINK_CREATE, &LinkCreate { prog_fd, target_ifindex: ifindex, attach_type, flags: 0 })
            .map(Link)
    }

    /// Attaches a classifier to the ingress of an interface, before all that are there, or in the
    /// place of `replaced`. It stays when this process ends, until it is detached or the interface
    /// goes. Error: `EINVAL` before Linux 6.6, `EPERM` without `CAP_NET_ADMIN`, `ENOENT` if
    /// `replaced` is not there.
    pub fn attach_first(&self, ifindex: u32, replaced: Option<&Self>) -> io::Result<()> {
        self.attach_at(ifindex, (ATTACH_TCX_INGRESS, F_BEFORE), replaced)
    }

    /// As [`attach_first`](Self::attach_first), behind all that are there. Error: as
    /// [`attach_first`](Self::attach_first).
    pub fn attach_last(&self, ifindex: u32, replaced: Option<&Self>) -> io::Result<()> {
        self.attach_at(ifindex, (ATTACH_TCX_INGRESS, F_AFTER), replaced)
    }

    /// As [`attach_first`](Self::attach_first), at the egress, behind all that are there. Error: as
    /// [`attach_first`](Self::attach_first).
    pub fn attach_egress(&self, ifindex: u32) -> io::Result<()> {
        self.attach_at(ifindex, (ATTACH_TCX_EGRESS, F_AFTER), None)
    }

    fn attach_at(
        &self,
        ifindex: u32,
        (attach_type, place): (u32, u32),
        replaced: Option<&Self>,
    ) -> io::Result<()> {
        let replace = replaced.map(|program| raw(&program.0));
        let attr = ProgAttach {
            target_ifindex: ifindex,
            attach_bpf_fd: raw(&self.0),
            attach_type,
            attach_flags: if replace.is_some() { F_REPLACE } else { place },
            replace_bpf_fd: replace.unwrap_or(0),
            ..ProgAttach::default()
        };
        bpf(PROG_ATTACH, &attr).map(|_| ())
    }

    /// Detaches what [`attach_first`](Self::attach_first) attached, perhaps in another process.
    /// Error: `ENOENT` if it is not there.
    pub fn detach(&self, ifindex: u32) -> io::Result<()> {
        self.detach_from(ifindex, ATTACH_TCX_INGRESS)
    }

    /// Detaches what [`attach_egress`](Self::attach_egress) attached. Error: as
    /// [`detach`](Self::detach).
    pub fn detach_egress(&self, ifindex: u32) -> io::Result<()> {
        self.detach_from(ifindex, ATTACH_TCX_EGRESS)
    }

    fn detach_from(&self, ifindex: u32, attach_type: u32) -> io::Result<()> {
        let attr = ProgAttach {
            target_ifindex: ifindex,
            attach_bpf_fd: raw(&self.0),
            attach_type,
            ..ProgAttach::default()
        };
        bpf(PROG_DETACH, &attr).map(|_| ())
    }

    /// The programs at the tcx ingress of an interface, in their order. Needs `CAP_SYS_ADMIN`.
    /// Error: `EINVAL` before Linux 6.6; `ENODEV`.
    pub fn at_ingress(ifindex: u32) -> io::Result<Vec<Self>> {
        Self::at(ifindex, true)
    }

    /// Those at the tcx egress, likewise. Error: as [`at_ingress`](Self::at_ingress).
    pub fn at_egress(ifindex: u32) -> io::Result<Vec<Self>> {
        Self::at(ifindex, false)
    }

    fn at(ifindex: u32, ingress: bool) -> io::Result<Vec<Self>> {
        let mut ids = [0_u32; PROGRAMS_MAX];
        let count = match programs(ifindex, ingress, &mut ids) {
            // An interface that never had one.
            Err(e) if e.raw_os_error() == Some(libc::ENOENT) => 0,
            count => count?,
        };
        let found = ids.iter().take(count as usize);
        let open = found.map(|&id| by_id(PROG_GET_FD_BY_ID, id));
        // One that has gone meanwhile.
        let is_there = |fd: &io::Result<OwnedFd>| !matches!(fd, Err(e) if e.raw_os_error() == Some(libc::ENOENT));
        open.filter(is_there).map(|fd| fd.map(Self)).collect()
    }

    /// The program's id, name, tag (a hash of its instructions without the maps) and maps. Error:
    /// the error of bpf(2).
    pub fn described(&self) -> io::Result<Described> {
        let mut maps = [0_u32; MAPS_MAX];
        let mut info = ProgInfo {
            nr_map_ids: maps.len() as u32,
            map_ids: maps.as_mut_ptr() as u64,
            ..ProgInfo::default()
        };
        get_info(&self.0, &mut info)?;
        let maps = maps.iter().take(info.nr_map_ids as usize);
        let maps = maps.map(|&id| Map::by_id(id)).collect::<io::Result<Vec<_>>>()?;
        Ok(Described { id: info.id, name: text(&info.name), tag: info.tag, maps })
    }

    fn load_quoting(
        prog_type: u32,
        flags: (u32, u32),
        prog: &str,
        code: &[Insn],
    ) -> io::Result<Self> {
        match Self::load_as(prog_type, flags, prog, code, &mut []) {
            Err(error) if matches!(error.raw_os_error(), Some(libc::EINVAL | libc::EACCES)) => {
                let mut log = vec![0; 64 << 10];
                let again = Self::load_as(prog_type, flags, prog, code, &mut log);
                again.map_err(|_| {
                    let reason = reason(&String::from_utf8_lossy(&log));
                    let text = format!("{error}; the kernel's verifier says: {reason}");
                    io::Error::new(error.kind(), text)
                })
            }
            other => other,
        }
    }

    fn load_as(
        prog_type: u32,
        (prog_flags, expected_attach_type): (u32, u32),
        prog: &str,
        code: &[Insn],
        log: &mut [u8],
    ) -> io::Result<Self> {
        let attr = ProgLoad {
            prog_type,
            insn_cnt: code.len() as u32,
            insns: code.as_ptr() as u64,
            license: c"MIT".as_ptr() as u64,
            log_level: u32::from(!log.is_empty()),
            log_size: log.len() as u32,
            log_buf: if log.is_empty() { 0 } else { log.as_mut_ptr() as u64 },
            kern_version: 0,
            prog_flags,
            name: name(prog),
            ifindex: 0,
            expected_attach_type,
        };
        bpf_fd(PROG_LOAD, &attr).map(Self)
    }
}

/// The kernel's description of a program.
#[derive(Debug)]
pub struct Described {
    /// Its id.
    pub id: u32,
    /// Its name.
    pub name: String,
    /// The hash of its instructions.
    pub tag: [u8; TAG_LEN],
    /// Its maps by name.
    pub maps: Vec<(String, Map)>,
}

impl Map {
    fn by_id(id: u32) -> io::Result<(String, Self)> {
        let fd = by_id(MAP_GET_FD_BY_ID, id)?;
        let mut info = MapInfo::default();
        get_info(&fd, &mut info)?;
        let (key_size, value_size) = (info.key_size as usize, info.value_size as usize);
        Ok((text(&info.name), Self { fd, key_size, value_size }))
    }
}

const fn tcx_hook(ingress: bool) -> u32 {
    if ingress { ATTACH_TCX_INGRESS } else { ATTACH_TCX_EGRESS }
}

/// The number of programs at a tcx hook of an interface. The ids of all are written to `ids`,
/// unless that is empty. Error: `EINVAL` before Linux 6.6, `EPERM` without `CAP_NET_ADMIN` over the
/// machine, `ENOSPC` if `ids` is too short.
pub fn programs(ifindex: u32, ingress: bool, ids: &mut [u32]) -> io::Result<u32> {
    let mut attr = ProgQuery {
        target_ifindex: ifindex,
        attach_type: tcx_hook(ingress),
        prog_ids: if ids.is_empty() { 0 } else { ids.as_mut_ptr() as u64 },
        prog_cnt: ids.len() as u32,
        ..ProgQuery::default()
    };
    bpf_mut(PROG_QUERY, &mut attr)?;
    Ok(attr.prog_cnt)
}

fn by_id(cmd: libc::c_long, id: u32) -> io::Result<OwnedFd> {
    bpf_fd(cmd, &GetId { id, next_id: 0, open_flags: 0 })
}

fn get_info<T>(fd: &OwnedFd, info: &mut T) -> io::Result<()> {
    let info_len = size_of::<T>() as u32;
    let info = std::ptr::from_mut(info) as u64;
    bpf_mut(OBJ_GET_INFO_BY_FD, &mut GetInfo { bpf_fd: raw(fd), info_len, info }).map(|_| ())
}

/// The text of an object's name.
fn text(name: &[u8; NAME_LEN]) -> String {
    let end = name.iter().position(|byte| *byte == 0).unwrap_or(NAME_LEN);
    String::from_utf8_lossy(&name[..end]).into_owned()
}

/// The instruction that the verifier refuses and its reason: the last two lines of its log, except
/// statistics.
fn reason(log: &str) -> String {
    let lines = log.trim_end_matches(['\0', '\n']).lines();
    let mut lines = lines.rev().skip_while(|line| line.starts_with("processed "));
    let (reason, instruction) = (lines.next().unwrap_or("nothing"), lines.next());
    instruction.map_or(reason.to_owned(), |instruction| format!("{instruction}: {reason}"))
}

impl AsFd for Program {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// The attachment of a program to an interface. The program detaches when the last descriptor of it
/// is closed.
#[derive(Debug)]
pub struct Link(OwnedFd);

impl From<Link> for OwnedFd {
    fn from(link: Link) -> Self {
        link.0
    }
}

impl AsFd for Link {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Whether a descriptor is a map that [`Map::shared_word`] made, perhaps in another process. Error:
/// no descriptor is left to ask by.
pub fn is_shared_word(fd: BorrowedFd<'_>) -> io::Result<bool> {
    const WANTED: [(&str, u32); 4] =
        [("map_type", MAP_TYPE_ARRAY), ("key_size", 4), ("value_size", 8), ("max_entries", 1)];
    let description = description(fd)?;
    Ok(WANTED.iter().all(|(name, value)| field(&description, name) == Some(&value.to_string())))
}

/// The interface of a link of an XDP program, perhaps of another process; `None` for any other
/// link. Error: as [`is_shared_word`].
pub fn interface_of(link: BorrowedFd<'_>) -> io::Result<Option<u32>> {
    let description = description(link)?;
    let is_xdp = field(&description, "link_type") == Some("xdp");
    Ok(field(&description, "ifindex").filter(|_| is_xdp).and_then(|index| index.parse().ok()))
}

/// Opens the program of a link by its number.
#[cfg(test)]
pub fn link_program_by_id(link: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let description = description(link)?;
    let id = field(&description, "prog_id").and_then(|id| id.parse().ok());
    by_id(PROG_GET_FD_BY_ID, id.expect("a link"))
}

/// What `/proc` says of a descriptor (proc_pid_fdinfo(5)).
fn description(fd: BorrowedFd<'_>) -> io::Result<String> {
    std::fs::read_to_string(format!("/proc/self/fdinfo/{}", fd.as_raw_fd()))
}

fn field<'a>(description: &'a str, name: &str) -> Option<&'a str> {
    let value = |line: &'a str| line.strip_prefix(name)?.strip_prefix(':').map(str::trim);
    description.lines().find_map(value)
}

/// The number of a socket or program descriptor, as maps and attributes contain it.
pub fn fd_value(fd: BorrowedFd<'_>) -> u32 {
    fd.as_raw_fd().cast_unsigned()
}

fn raw(fd: &OwnedFd) -> u32 {
    fd.as_raw_fd().cast_unsigned()
}

/// An object name of at most 15 bytes.
fn name(text: &str) -> [u8; NAME_LEN] {
    let mut name = [0; NAME_LEN];
    for (to, from) in name[..NAME_LEN - 1].iter_mut().zip(text.bytes()) {
        *to = from;
    }
    name
}

fn bpf_fd<T>(cmd: libc::c_long, attr: &T) -> io::Result<OwnedFd> {
    let fd = bpf(cmd, attr)?;
    // SAFETY: the command returned a new descriptor without another owner; bpf(2) makes all of them
    // close-on-exec.
    Ok(inherited::noted_bpf(unsafe { OwnedFd::from_raw_fd(fd) }))
}

/// `bpf(cmd, attr)`. The attributes' pointers are valid as the callers above state.
fn bpf<T>(cmd: libc::c_long, attr: &T) -> io::Result<i32> {
    // SAFETY: `attr` is a prefix of `union bpf_attr` of the size given; the buffers it points to
    // live in the callers' frames and have the sizes that the attributes or the map's definition
    // state. Only the verifier's log, a looked up value, the next key and the description of a
    // program or a map are written, through pointers that were made from exclusive borrows.
    let result =
        unsafe { libc::syscall(libc::SYS_bpf, cmd, std::ptr::from_ref(attr), size_of::<T>()) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result as i32) }
}

/// As [`bpf`], where the kernel writes into the attributes.
fn bpf_mut<T>(cmd: libc::c_long, attr: &mut T) -> io::Result<i32> {
    // SAFETY: as in `bpf`; the attributes are borrowed exclusively, and the kernel writes no more
    // than their size.
    let result =
        unsafe { libc::syscall(libc::SYS_bpf, cmd, std::ptr::from_mut(attr), size_of::<T>()) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result as i32) }
}

#[repr(C)]
struct TestRun {
    prog_fd: u32,
    retval: u32,
    data_size_in: u32,
    data_size_out: u32,
    data_in: u64,
    data_out: u64,
    repeat: u32,
    duration: u32,
    pad: [u32; 2],
    ctx: [u64; 2],
    flags: u32,
    cpu: u32,
}

impl Program {
    /// The program's verdict on a frame on receive queue 0 (`BPF_PROG_TEST_RUN`).
    pub fn test_run(&self, frame: &[u8]) -> io::Result<u32> {
        let mut attr = TestRun {
            prog_fd: raw(&self.0),
            retval: u32::MAX,
            data_size_in: frame.len() as u32,
            data_size_out: 0,
            data_in: frame.as_ptr() as u64,
            data_out: 0,
            repeat: 1,
            duration: 0,
            pad: [0; 2],
            ctx: [0; 2],
            flags: 0,
            cpu: 0,
        };
        bpf_mut(PROG_TEST_RUN, &mut attr)?;
        Ok(attr.retval)
    }
}
