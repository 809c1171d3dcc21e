//! `bpf(2)`: maps, the program, its link and test runs. Layouts: `union bpf_attr` of
//! `include/uapi/linux/bpf.h`; the kernel takes a prefix of it and treats the rest as zero.
#![allow(unsafe_code)]

use super::asm::Insn;
use crate::inherited;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

// `enum bpf_cmd`.
const MAP_CREATE: libc::c_long = 0;
const MAP_LOOKUP_ELEM: libc::c_long = 1;
const MAP_UPDATE_ELEM: libc::c_long = 2;
const MAP_DELETE_ELEM: libc::c_long = 3;
const MAP_GET_NEXT_KEY: libc::c_long = 4;
const PROG_LOAD: libc::c_long = 5;
const PROG_ATTACH: libc::c_long = 8;
const PROG_DETACH: libc::c_long = 9;
#[cfg(test)]
const PROG_TEST_RUN: libc::c_long = 10;
const PROG_GET_FD_BY_ID: libc::c_long = 13;
const MAP_GET_FD_BY_ID: libc::c_long = 14;
const OBJ_GET_INFO_BY_FD: libc::c_long = 15;
const PROG_QUERY: libc::c_long = 16;
const LINK_CREATE: libc::c_long = 28;

const MAP_TYPE_HASH: u32 = 1;
const MAP_TYPE_ARRAY: u32 = 2;
const MAP_TYPE_XSKMAP: u32 = 17;
const PROG_TYPE_SCHED_CLS: u32 = 3;
const PROG_TYPE_XDP: u32 = 6;
const ATTACH_XDP: u32 = 37;
const ATTACH_TCX_INGRESS: u32 = 46;
const ATTACH_TCX_EGRESS: u32 = 47;
/// `BPF_F_REPLACE` and `BPF_F_BEFORE`: in the place of a program; before all others.
const F_REPLACE: u32 = 1 << 2;
const F_BEFORE: u32 = 1 << 3;
/// The most programs of an interface that are read.
const PROGRAMS_MAX: usize = 64;
/// The most maps of a program that are read.
const MAPS_MAX: usize = 8;
/// Length of a program's tag, and of an object's name.
const TAG_LEN: usize = 8;
const NAME_LEN: usize = 16;
/// `BPF_F_XDP_HAS_FRAGS`: the program reads only the linear part and so accepts frames of several
/// fragments, which a veth needs above an MTU of about 3500.
const F_XDP_HAS_FRAGS: u32 = 1 << 5;
/// `XDP_FLAGS_SKB_MODE` and `XDP_FLAGS_DRV_MODE` of `if_link.h`.
const XDP_FLAGS_SKB_MODE: u32 = 1 << 1;
const XDP_FLAGS_DRV_MODE: u32 = 1 << 2;

#[repr(C)]
struct MapCreate {
    map_type: u32,
    key_size: u32,
    value_size: u32,
    max_entries: u32,
    flags: u32,
    inner_map_fd: u32,
    numa_node: u32,
    name: [u8; 16],
}

#[repr(C)]
struct MapElem {
    map_fd: u32,
    pad: u32,
    key: u64,
    value: u64,
    flags: u64,
}

#[repr(C)]
struct ProgLoad {
    prog_type: u32,
    insn_cnt: u32,
    insns: u64,
    license: u64,
    log_level: u32,
    log_size: u32,
    log_buf: u64,
    kern_version: u32,
    prog_flags: u32,
    name: [u8; 16],
    ifindex: u32,
    expected_attach_type: u32,
}

#[repr(C)]
struct ProgAttach {
    target_ifindex: u32,
    attach_bpf_fd: u32,
    attach_type: u32,
    attach_flags: u32,
    replace_bpf_fd: u32,
    relative_fd: u32,
    expected_revision: u64,
}

#[repr(C)]
struct ProgQuery {
    target_ifindex: u32,
    attach_type: u32,
    query_flags: u32,
    attach_flags: u32,
    prog_ids: u64,
    prog_cnt: u32,
    pad: u32,
    prog_attach_flags: u64,
    link_ids: u64,
    link_attach_flags: u64,
    revision: u64,
}

#[repr(C)]
struct GetId {
    id: u32,
    next_id: u32,
    open_flags: u32,
}

#[repr(C)]
struct GetInfo {
    bpf_fd: u32,
    info_len: u32,
    info: u64,
}

/// The start of `struct bpf_prog_info`.
#[derive(Default)]
#[repr(C)]
struct ProgInfo {
    kind: u32,
    id: u32,
    tag: [u8; TAG_LEN],
    jited_len: u32,
    xlated_len: u32,
    jited: u64,
    xlated: u64,
    load_time: u64,
    uid: u32,
    nr_map_ids: u32,
    map_ids: u64,
    name: [u8; NAME_LEN],
}

/// The start of `struct bpf_map_info`.
#[derive(Default)]
#[repr(C)]
struct MapInfo {
    kind: u32,
    id: u32,
    key_size: u32,
    value_size: u32,
    max_entries: u32,
    flags: u32,
    name: [u8; NAME_LEN],
}

#[repr(C)]
struct LinkCreate {
    prog_fd: u32,
    target_ifindex: u32,
    attach_type: u32,
    flags: u32,
}

/// The most keys of a map that [`Map::keys`] returns.
const KEYS_MAX: usize = 1 << 16;

/// A BPF map, shared with the program.
#[derive(Debug)]
pub(crate) struct Map {
    fd: OwnedFd,
    key_size: usize,
    value_size: usize,
}

impl Map {
    /// A hash of `entries` keys of `key_size` bytes to a `u32`.
    pub(crate) fn hash(name: &str, key_size: usize, entries: u32) -> io::Result<Self> {
        Self::create(MAP_TYPE_HASH, name, key_size, entries)
    }

    /// An array of `entries` numbers.
    pub(crate) fn numbers(name: &str, entries: u32) -> io::Result<Self> {
        Self::create(MAP_TYPE_ARRAY, name, size_of::<u32>(), entries)
    }

    /// An array of `entries` counters of 64 bits, for [`count`](Self::count).
    pub(crate) fn counters(name: &str, entries: u32) -> io::Result<Self> {
        Self::create_with(MAP_TYPE_ARRAY, name, size_of::<u32>(), size_of::<u64>(), entries)
    }

    /// An array of AF_XDP sockets by receive queue.
    pub(crate) fn sockets(name: &str, entries: u32) -> io::Result<Self> {
        Self::create(MAP_TYPE_XSKMAP, name, size_of::<u32>(), entries)
    }

    /// A map with keys of `key_size` bytes, perhaps made by another process.
    ///
    /// # Errors
    /// `EINVAL` for another map, and for no map: the kernel reads as many bytes of a key and a
    /// value as the map has.
    pub(crate) fn of_fd(fd: OwnedFd, key_size: usize) -> io::Result<Self> {
        let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", fd.as_raw_fd()))?;
        let size =
            |name| info.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok());
        if (size("key_size:"), size("value_size:")) != (Some(key_size), Some(size_of::<u32>())) {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        Ok(Self { fd, key_size, value_size: size_of::<u32>() })
    }

    /// Sets `key` (of the map's key size) to `value`.
    pub(crate) fn set(&self, key: &[u8], value: u32) -> io::Result<()> {
        self.change(MAP_UPDATE_ELEM, key, size_of_val(&value), (&raw const value) as u64)
    }

    /// The value of `key` (of the map's key size); `ENOENT` if it is not in the map.
    pub(crate) fn value(&self, key: &[u8]) -> io::Result<u32> {
        let mut value = 0u32;
        self.change(MAP_LOOKUP_ELEM, key, size_of_val(&value), (&raw mut value) as u64)?;
        Ok(value)
    }

    /// A counter of [`counters`](Self::counters).
    pub(crate) fn count(&self, index: u32) -> io::Result<u64> {
        let mut value = 0u64;
        let size = size_of_val(&value);
        self.change(MAP_LOOKUP_ELEM, &index.to_ne_bytes(), size, (&raw mut value) as u64)?;
        Ok(value)
    }

    /// All keys, in no order. Another thread or process that changes the map meanwhile may make
    /// keys appear twice or not at all.
    pub(crate) fn keys(&self) -> io::Result<Vec<Vec<u8>>> {
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
    pub(crate) fn remove(&self, key: &[u8]) -> io::Result<()> {
        self.change(MAP_DELETE_ELEM, key, self.value_size, 0)
    }

    /// Whether keys and values have these sizes.
    pub(crate) fn has_sizes(&self, key: usize, value: usize) -> bool {
        (self.key_size, self.value_size) == (key, value)
    }

    fn change(&self, cmd: libc::c_long, key: &[u8], size: usize, value: u64) -> io::Result<()> {
        assert_eq!((key.len(), size), (self.key_size, self.value_size), "sizes");
        let (map_fd, key) = (raw(&self.fd), key.as_ptr() as u64);
        bpf(cmd, &MapElem { map_fd, pad: 0, key, value, flags: 0 }).map(|_| ())
    }

    /// The descriptor, for a program that uses the map.
    pub(crate) fn raw_fd(&self) -> i32 {
        self.fd.as_raw_fd()
    }

    /// The descriptor, for another process.
    pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    fn create(map_type: u32, map: &str, key_size: usize, entries: u32) -> io::Result<Self> {
        Self::create_with(map_type, map, key_size, size_of::<u32>(), entries)
    }

    fn create_with(
        map_type: u32,
        map: &str,
        key_size: usize,
        value_size: usize,
        entries: u32,
    ) -> io::Result<Self> {
        let attr = MapCreate {
            map_type,
            key_size: key_size as u32,
            value_size: value_size as u32,
            max_entries: entries,
            flags: 0,
            inner_map_fd: 0,
            numa_node: 0,
            name: name(map),
        };
        Ok(Self { fd: bpf_fd(MAP_CREATE, &attr)?, key_size, value_size })
    }
}

/// A loaded XDP program.
#[derive(Debug)]
pub(crate) struct Program(OwnedFd);

impl Program {
    /// Loads and verifies. If the verifier refuses, the error quotes the end of its log.
    pub(crate) fn load(prog: &str, code: &[Insn]) -> io::Result<Self> {
        match Self::load_with_log(prog, code, &mut []) {
            Err(error) if matches!(error.raw_os_error(), Some(libc::EINVAL | libc::EACCES)) => {
                let mut log = vec![0; 64 << 10];
                let again = Self::load_with_log(prog, code, &mut log);
                again.map_err(|_| {
                    let reason = reason(&String::from_utf8_lossy(&log));
                    let text = format!("{error}; the kernel's verifier says: {reason}");
                    io::Error::new(error.kind(), text)
                })
            }
            other => other,
        }
    }

    /// Attaches to an interface until the link is dropped or the process ends in any way.
    pub(crate) fn attach(&self, ifindex: u32, generic: bool) -> io::Result<Link> {
        let attr = LinkCreate {
            prog_fd: raw(&self.0),
            target_ifindex: ifindex,
            attach_type: ATTACH_XDP,
            flags: if generic { XDP_FLAGS_SKB_MODE } else { XDP_FLAGS_DRV_MODE },
        };
        bpf_fd(LINK_CREATE, &attr).map(Link)
    }

    /// Loads and verifies a program for [`attach_tcx`](Self::attach_tcx).
    pub(crate) fn load_classifier(prog: &str, code: &[Insn]) -> io::Result<Self> {
        Self::load_as(PROG_TYPE_SCHED_CLS, (0, 0), prog, code, &mut [])
    }

    /// Attaches a classifier to an interface, behind the programs that are there, until the link
    /// is dropped or the process ends in any way.
    pub(crate) fn attach_tcx(&self, ifindex: u32, ingress: bool) -> io::Result<Link> {
        let attach_type = if ingress { ATTACH_TCX_INGRESS } else { ATTACH_TCX_EGRESS };
        let prog_fd = raw(&self.0);
        bpf_fd(LINK_CREATE, &LinkCreate { prog_fd, target_ifindex: ifindex, attach_type, flags: 0 })
            .map(Link)
    }

    /// Attaches a classifier to what enters an interface, before all that are there, or in the
    /// place of `replaced`. It stays when this process ends, until it is detached or the interface
    /// goes.
    ///
    /// # Errors
    /// `EINVAL` before Linux 6.6, `EPERM` without `CAP_NET_ADMIN`, `ENOENT` if `replaced` is not
    /// there.
    pub(crate) fn attach_first(&self, ifindex: u32, replaced: Option<&Self>) -> io::Result<()> {
        let replace = replaced.map(|program| raw(&program.0));
        let attr = ProgAttach {
            target_ifindex: ifindex,
            attach_bpf_fd: raw(&self.0),
            attach_type: ATTACH_TCX_INGRESS,
            attach_flags: if replace.is_some() { F_REPLACE } else { F_BEFORE },
            replace_bpf_fd: replace.unwrap_or(0),
            relative_fd: 0,
            expected_revision: 0,
        };
        bpf(PROG_ATTACH, &attr).map(|_| ())
    }

    /// Detaches what [`attach_first`](Self::attach_first) attached, perhaps in another process.
    ///
    /// # Errors
    /// `ENOENT` if it is not there.
    pub(crate) fn detach(&self, ifindex: u32) -> io::Result<()> {
        let attr = ProgAttach {
            target_ifindex: ifindex,
            attach_bpf_fd: raw(&self.0),
            attach_type: ATTACH_TCX_INGRESS,
            attach_flags: 0,
            replace_bpf_fd: 0,
            relative_fd: 0,
            expected_revision: 0,
        };
        bpf(PROG_DETACH, &attr).map(|_| ())
    }

    /// The programs at the tcx ingress of an interface, in their order. Needs `CAP_SYS_ADMIN`.
    ///
    /// # Errors
    /// `EINVAL` before Linux 6.6; `ENODEV`.
    pub(crate) fn at_ingress(ifindex: u32) -> io::Result<Vec<Self>> {
        let mut ids = [0_u32; PROGRAMS_MAX];
        let mut attr = ProgQuery {
            target_ifindex: ifindex,
            attach_type: ATTACH_TCX_INGRESS,
            query_flags: 0,
            attach_flags: 0,
            prog_ids: ids.as_mut_ptr() as u64,
            prog_cnt: ids.len() as u32,
            pad: 0,
            prog_attach_flags: 0,
            link_ids: 0,
            link_attach_flags: 0,
            revision: 0,
        };
        match bpf_mut(PROG_QUERY, &mut attr) {
            Ok(_) => {}
            // An interface that never had one.
            Err(e) if e.raw_os_error() == Some(libc::ENOENT) => return Ok(Vec::new()),
            Err(e) => return Err(e),
        }
        let found = ids.iter().take(attr.prog_cnt as usize);
        let open = found.map(|&id| by_id(PROG_GET_FD_BY_ID, id));
        // One that has gone meanwhile.
        let is_there = |fd: &io::Result<OwnedFd>| !matches!(fd, Err(e) if e.raw_os_error() == Some(libc::ENOENT));
        open.filter(is_there).map(|fd| fd.map(Self)).collect()
    }

    /// The program's id, name, tag (a hash of its instructions without the maps) and maps.
    ///
    /// # Errors
    /// The error of bpf(2).
    pub(crate) fn described(&self) -> io::Result<Described> {
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

    fn load_with_log(prog: &str, code: &[Insn], log: &mut [u8]) -> io::Result<Self> {
        Self::load_as(PROG_TYPE_XDP, (F_XDP_HAS_FRAGS, ATTACH_XDP), prog, code, log)
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

/// What the kernel says of a program.
#[derive(Debug)]
pub(crate) struct Described {
    /// Its id.
    pub(crate) id: u32,
    /// Its name.
    pub(crate) name: String,
    /// The hash of its instructions.
    pub(crate) tag: [u8; TAG_LEN],
    /// Its maps by name.
    pub(crate) maps: Vec<(String, Map)>,
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

/// The attachment of a program to an interface. The program detaches when the last descriptor of it
/// is closed.
#[derive(Debug)]
pub(crate) struct Link(OwnedFd);

impl AsFd for Link {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// The number of a socket or program descriptor, as maps and attributes contain it.
pub(crate) fn fd_value(fd: BorrowedFd<'_>) -> u32 {
    fd.as_raw_fd().cast_unsigned()
}

fn raw(fd: &OwnedFd) -> u32 {
    fd.as_raw_fd().cast_unsigned()
}

/// An object name of at most 15 bytes.
fn name(text: &str) -> [u8; 16] {
    let mut name = [0; 16];
    for (to, from) in name[..15].iter_mut().zip(text.bytes()) {
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

/// `bpf(cmd, attr)`. The attributes' pointers are valid for what the callers above state.
fn bpf<T>(cmd: libc::c_long, attr: &T) -> io::Result<i32> {
    // SAFETY: `attr` is a prefix of `union bpf_attr` of the size given; the buffers it points to
    // live in the callers' frames and have the sizes that the attributes or the map's definition
    // state. Only the verifier's log, a looked up value, the next key and what describes a program
    // or a map are written, through pointers that were made from exclusive borrows.
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

#[cfg(test)]
pub(crate) mod test_run {
    use super::*;

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
        pub(crate) fn test_run(&self, frame: &[u8]) -> io::Result<u32> {
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
            // SAFETY: the attributes are a prefix of `union bpf_attr`; the kernel reads
            // `data_size_in` bytes of the frame and writes `retval`, `duration` and
            // `data_size_out` back into `attr`, which is borrowed exclusively.
            let result = unsafe {
                libc::syscall(libc::SYS_bpf, PROG_TEST_RUN, &raw mut attr, size_of::<TestRun>())
            };
            if result < 0 { Err(io::Error::last_os_error()) } else { Ok(attr.retval) }
        }
    }
}
