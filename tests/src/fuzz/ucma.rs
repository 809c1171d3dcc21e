//! Commands to rdma_cm in any order, well-formed and malformed, of several files, over loopback.
//!
//! An answer fits the room that was given, and goes where the command wants it. A file gets events
//! of its own ids only, and cannot use the ids of another. Each event that was read is counted
//! once. In the end nothing is left.

use std::net::SocketAddr;
use std::sync::{LazyLock, Mutex, PoisonError};
use std::time::Duration;

use rocinante_ibverbs::fuzzing::{Left, RdmaCm};

use super::Input;

/// A process, and a file that keeps its devices open from one input to the next.
static PROCESS: LazyLock<Mutex<RdmaCm>> = LazyLock::new(|| {
    let cm = RdmaCm::on_loopback();
    cm.open().expect("a file");
    Mutex::new(cm)
});

const FILES_MAX: usize = 4;
const IDS_MAX: usize = 24;
/// Where the answers shall go.
const RESPONSE: u64 = 0x1234_5678_9abc;
/// The memory that options are read from.
const MEMORY: [u8; 16] = [16, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0];

/// The end of a request: it is not read, only read, or accepted.
const UNREAD: u8 = 0;
const READ: u8 = 1;
const ACCEPTED: u8 = 2;

/// Where a command has its parts (`rdma/rdma_user_cm.h`).
struct Shape {
    len: usize,
    response: Option<usize>,
    id: Option<usize>,
    addresses: &'static [usize],
    /// Bytes that decide the command's action, and values that they may have.
    choices: &'static [(usize, &'static [u8])],
}

const fn shape(
    len: usize,
    response: Option<usize>,
    id: Option<usize>,
    addresses: &'static [usize],
    choices: &'static [(usize, &'static [u8])],
) -> Shape {
    Shape { len, response, id, addresses, choices }
}

const CREATE: usize = 0;
const DESTROY: usize = 1;
const RESOLVE_ROUTE: usize = 4;
const CONNECT: usize = 6;
const LISTEN: usize = 7;
const ACCEPT: usize = 8;
const GET_EVENT: usize = 12;
const JOIN_IP: usize = 16;
const LEAVE: usize = 17;
const MIGRATE: usize = 18;
const BIND: usize = 20;
const RESOLVE_ADDR: usize = 21;
const JOIN: usize = 22;

const SHAPES: [Shape; 23] = [
    // RDMA_PS_TCP, _UDP, _IPOIB, _IB; RC, UC, UD.
    shape(
        24,
        Some(8),
        None,
        &[],
        &[(16, &[0x06, 0x11, 0x02, 0x3f]), (17, &[1, 1, 1, 0]), (18, &[2, 3, 4])],
    ),
    shape(16, Some(0), Some(8), &[], &[]),
    shape(40, None, Some(36), &[8], &[]),
    shape(64, None, Some(56), &[0, 28], &[]),
    shape(8, None, Some(0), &[], &[]),
    shape(16, Some(0), Some(8), &[], &[]),
    shape(280, None, Some(272), &[], &[(0, &[0, 2]), (264, &[0, 9, 56, 255]), (271, &[1, 1, 0])]),
    shape(8, None, Some(0), &[], &[(4, &[0, 1, 2, 255])]),
    shape(
        288,
        None,
        Some(280),
        &[],
        &[(0, &[1, 2, 0]), (8, &[0, 3]), (272, &[0, 9, 255]), (279, &[1, 1, 0])],
    ),
    shape(264, None, Some(0), &[], &[(4, &[0, 3, 255]), (5, &[0, 28, 35, 1])]),
    shape(4, None, Some(0), &[], &[]),
    shape(16, Some(0), Some(8), &[], &[(12, &[0, 1, 2, 3, 4])]),
    shape(8, Some(0), None, &[], &[]),
    shape(24, None, Some(8), &[], &[]),
    shape(
        24,
        None,
        Some(8),
        &[],
        &[(12, &[0, 0, 0, 1, 2]), (16, &[0, 1, 2, 3, 4]), (20, &[1, 4, 0, 17])],
    ),
    shape(8, None, Some(0), &[], &[(4, &[4, 0])]),
    shape(48, Some(0), Some(44), &[16], &[(8, &[1, 2, 0])]),
    shape(16, Some(0), Some(8), &[], &[]),
    shape(16, Some(0), Some(8), &[], &[]),
    shape(16, Some(0), Some(8), &[], &[(12, &[0, 1, 2, 3])]),
    shape(136, None, Some(0), &[8], &[(4, &[16, 28])]),
    shape(272, None, Some(0), &[16, 144], &[(8, &[16, 0, 28]), (10, &[16, 28])]),
    shape(152, Some(0), Some(16), &[24], &[(8, &[1, 2, 0]), (20, &[16]), (22, &[0, 1, 2])]),
];

/// An id that the program knows.
struct Id {
    number: u32,
    uid: u64,
}

struct Group {
    number: u32,
    uid: u64,
    id: u32,
}

struct File {
    fd: i32,
    ids: Vec<Id>,
    groups: Vec<Group>,
}

/// A program, with the state that it must have of its files.
struct Program<'a> {
    cm: &'a RdmaCm,
    files: Vec<File>,
    /// Events that it has read, and those that its ids have counted when they were destroyed.
    read: u32,
    counted: u32,
    /// Whether a file was closed with ids, whose counts are lost.
    is_uncounted: bool,
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_ne_bytes(array(bytes, at))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_ne_bytes(array(bytes, at))
}

/// Bytes behind the end are 0.
fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    std::array::from_fn(|n| bytes.get(at + n).copied().unwrap_or(0))
}

fn put(body: &mut [u8], at: usize, bytes: &[u8]) {
    body[at..at + bytes.len()].copy_from_slice(bytes);
}

fn sockaddr(address: SocketAddr) -> Vec<u8> {
    let port = address.port().to_be_bytes();
    match address {
        SocketAddr::V4(it) => [&2u16.to_ne_bytes()[..], &port, &it.ip().octets()].concat(),
        SocketAddr::V6(it) => {
            [&10u16.to_ne_bytes()[..], &port, &[0; 4], &it.ip().octets()].concat()
        }
    }
}

/// A command about an id, with these parts.
fn of(number: usize, id: u32, parts: &[(usize, &[u8])]) -> Vec<u8> {
    let mut body = vec![0; SHAPES[number].len];
    put(&mut body, SHAPES[number].id.expect("it has"), &id.to_ne_bytes());
    for (at, bytes) in parts {
        put(&mut body, *at, bytes);
    }
    body
}

fn any_address(input: &mut Input<'_>) -> Vec<u8> {
    let port = input.of(&[7001, 7001, 7002, 0]);
    let ip = match input.u8() % 16 {
        0..8 => "127.0.0.1",
        8 | 9 => "0.0.0.0",
        10 => "::1",
        11 => "::",
        12 => "239.1.2.3",
        13 => "192.0.2.1",
        // AF_IB, as a wildcard.
        14 => return 27u16.to_ne_bytes().to_vec(),
        _ => return Vec::new(),
    };
    sockaddr(SocketAddr::new(ip.parse().expect("an address"), port))
}

impl Program<'_> {
    fn owner(&self, id: u32) -> Option<usize> {
        self.files.iter().position(|file| file.ids.iter().any(|it| it.number == id))
    }

    fn ids(&self) -> usize {
        self.files.iter().map(|file| file.ids.len()).sum()
    }

    fn open(&mut self) {
        if self.files.len() < FILES_MAX {
            let fd = self.cm.open().expect("a file");
            self.files.push(File { fd, ids: Vec::new(), groups: Vec::new() });
        }
    }

    fn close(&mut self, file: usize) {
        let file = self.files.remove(file);
        self.is_uncounted |= !file.ids.is_empty();
        assert!(self.cm.close(file.fd));
        assert_eq!(self.cm.command(file.fd, &[0; 8], &[]), Err(libc::EBADF));
    }

    /// A command as librdmacm gives it.
    fn command(&mut self, file: usize, number: usize, body: &[u8]) -> Result<Vec<u8>, i32> {
        self.raw(file, number as u32, (body.len() as u16, 1024), body)
    }

    /// Any command. Checks its result.
    fn raw(
        &mut self,
        file: usize,
        number: u32,
        (len, room): (u16, u16),
        body: &[u8],
    ) -> Result<Vec<u8>, i32> {
        let (len_bytes, room_bytes) = (len.to_ne_bytes(), room.to_ne_bytes());
        let bytes = [&number.to_ne_bytes()[..], &len_bytes, &room_bytes, body].concat();
        let done = self.cm.command(self.files[file].fd, &bytes, &MEMORY);
        let known = SHAPES.get(number as usize).map(|shape| (number as usize, shape));
        let (Some((number, shape)), Some(body)) = (known, body.get(..usize::from(len))) else {
            let errno = done.expect_err("no such command");
            assert!([libc::ENOSYS, libc::EINVAL].contains(&errno), "{errno}");
            return Err(errno);
        };
        if let Err(errno) = done {
            assert!((1..=133).contains(&errno) && errno != libc::EIO, "{number}: {errno}");
        }
        self.check_owner(file, (number, shape), body, done.as_ref().err().copied());
        let (to, answer) = done?;
        assert!(answer.len() <= room.into(), "{number}: {} bytes for {room}", answer.len());
        assert!(
            answer.is_empty() || Some(to) == shape.response.map(|at| u64_at(body, at)),
            "{number}: to {to:#x}"
        );
        match number {
            CREATE => {
                let id = u32_at(&answer, 0);
                assert_eq!(self.owner(id), None, "id {id} is there twice");
                self.files[file].ids.push(Id { number: id, uid: u64_at(body, 0) });
            }
            DESTROY => self.destroyed(file, u32_at(body, 8), u32_at(&answer, 0)),
            MIGRATE => self.migrated(u32_at(body, 8), u32_at(body, 12), file),
            JOIN | JOIN_IP => {
                let id = u32_at(body, shape.id.expect("it has"));
                let uid = u64_at(body, 8);
                self.files[file].groups.push(Group { number: u32_at(&answer, 0), uid, id });
            }
            LEAVE => {
                let groups = &mut self.files[file].groups;
                let at = groups.iter().position(|group| group.number == u32_at(body, 8));
                groups.remove(at.expect("a group of this file"));
            }
            ACCEPT if body.get(279).is_some_and(|valid| *valid != 0) => {
                let id = u32_at(body, 280);
                let id = self.files[file].ids.iter_mut().find(|it| it.number == id);
                id.expect("one of this file").uid = u64_at(body, 0);
            }
            GET_EVENT => self.event(file, &answer, room),
            _ => {}
        }
        Ok(answer)
    }

    /// Only the file that has an id does something with it.
    fn check_owner(
        &self,
        file: usize,
        (number, shape): (usize, &Shape),
        body: &[u8],
        errno: Option<i32>,
    ) {
        let Some(at) = shape.id.filter(|_| ![LEAVE, MIGRATE].contains(&number)) else { return };
        let id = u32_at(body, at);
        if self.owner(id) == Some(file) {
            assert_ne!(errno, Some(libc::ENOENT), "{number}: id {id} is there");
        } else {
            assert!(errno.is_some(), "{number}: id {id} is not this file's");
        }
    }

    fn destroyed(&mut self, file: usize, id: u32, reported: u32) {
        let file = &mut self.files[file];
        file.ids.retain(|it| it.number != id);
        file.groups.retain(|group| group.id != id);
        self.counted += reported;
    }

    fn migrated(&mut self, id: u32, from: u32, to: usize) {
        let from = self.files.iter().position(|file| file.fd as u32 == from);
        let from = from.expect("a file of the program");
        assert_eq!(self.owner(id), Some(from), "id {id} came from another file");
        let file = &mut self.files[from];
        let ids: Vec<Id> = file.ids.extract_if(.., |it| it.number == id).collect();
        let groups: Vec<Group> = file.groups.extract_if(.., |group| group.id == id).collect();
        self.files[to].ids.extend(ids);
        self.files[to].groups.extend(groups);
    }

    /// An event names an id or group that the file has, or a new one.
    fn event(&mut self, file: usize, event: &[u8], room: u16) {
        const REQUEST: u32 = 4;
        const MULTICAST: [u32; 2] = [12, 13];
        assert_eq!(event.len(), usize::from(room).min(336));
        let (uid, number, kind) = (u64_at(event, 0), u32_at(event, 8), u32_at(event, 12));
        self.read += 1;
        let owner = self.owner(number);
        let it = &mut self.files[file];
        if MULTICAST.contains(&kind) {
            let known = it.groups.iter().any(|group| (group.number, group.uid) == (number, uid));
            assert!(known, "group {number} is not this file's");
        } else if kind == REQUEST {
            assert_eq!(owner, None, "request {number} is there already");
            assert!(it.ids.iter().any(|id| id.uid == uid), "no listener");
            it.ids.push(Id { number, uid: 0 });
        } else {
            let known = it.ids.iter().any(|id| (id.number, id.uid) == (number, uid));
            assert!(known, "event {kind} of id {number}, uid {uid}");
        }
    }

    fn read_event(&mut self, file: usize) -> Result<Vec<u8>, i32> {
        self.command(file, GET_EVENT, &RESPONSE.to_ne_bytes())
    }

    /// Reads the next event, for which it waits a moment.
    fn wait(&mut self, file: usize) {
        for _ in 0..8 {
            if self.read_event(file).is_ok() {
                return;
            }
            std::thread::sleep(Duration::from_micros(50));
        }
    }

    /// An id; mostly one of the file.
    fn pick(&self, file: usize, input: &mut Input<'_>) -> u32 {
        let (how, which) = (input.u8(), usize::from(input.u8()));
        let file = match how % 8 {
            0 => usize::from(how / 8) % self.files.len(),
            1 => return u32::from(how / 8),
            _ => file,
        };
        let ids = &self.files[file].ids;
        let which = match how % 8 {
            2..4 => ids.len().saturating_sub(1),
            _ => which % ids.len().max(1),
        };
        ids.get(which).map_or(which as u32, |id| id.number)
    }

    /// A command with its parts in their places, and maybe some damage.
    fn compose(&mut self, file: usize, number: usize, input: &mut Input<'_>) {
        let shape = &SHAPES[number];
        let mut body = vec![0; shape.len];
        for (at, values) in shape.choices {
            body[*at] = input.of(values);
        }
        if number == CREATE {
            body[0] = input.u8();
            if self.ids() >= IDS_MAX {
                return;
            }
        }
        if let Some(at) = shape.response {
            put(&mut body, at, &RESPONSE.to_ne_bytes());
        }
        for at in shape.addresses {
            put(&mut body, *at, &any_address(input));
        }
        match (number, shape.id) {
            (LEAVE, Some(at)) => {
                let groups: Vec<u32> =
                    self.files.iter().flat_map(|it| &it.groups).map(|it| it.number).collect();
                let which = usize::from(input.u8());
                let group = groups.get(which % groups.len().max(1)).copied();
                put(&mut body, at, &group.unwrap_or(which as u32).to_ne_bytes());
            }
            (MIGRATE, Some(at)) => {
                let from = usize::from(input.u8()) % self.files.len();
                put(&mut body, at, &self.pick(from, input).to_ne_bytes());
                put(&mut body, 12, &self.files[from].fd.to_ne_bytes());
            }
            (_, Some(at)) => put(&mut body, at, &self.pick(file, input).to_ne_bytes()),
            (_, None) => {}
        }
        let damage = input.u8();
        for _ in 0..if damage < 192 { 0 } else { damage % 4 } {
            let at = usize::from(input.u16()) % body.len();
            body[at] = input.u8();
        }
        if damage % 32 == 31 {
            body.truncate(usize::from(input.u16()) % (body.len() + 1));
        }
        let room = match damage % 16 {
            15 => input.of(&[0, 3, 4, 143, 144, 199, 200, 271, 272, 323, 324, 335, 336]),
            _ => 1024,
        };
        let _ = self.raw(file, number as u32, (body.len() as u16, room), &body);
    }

    fn create(&mut self, file: usize, space: u16, uid: u64) -> Option<u32> {
        let qp_type = if space == 0x0111 { 4 } else { 2 };
        let mut body = vec![0; SHAPES[CREATE].len];
        put(&mut body, 0, &uid.to_ne_bytes());
        put(&mut body, 8, &RESPONSE.to_ne_bytes());
        put(&mut body, 16, &space.to_ne_bytes());
        body[18] = qp_type;
        self.command(file, CREATE, &body).ok().map(|answer| u32_at(&answer, 0))
    }

    /// One file listens, another one asks for a connection, or for a queue pair for datagrams.
    fn talk(&mut self, (server, client): (usize, usize), input: &mut Input<'_>) -> Option<()> {
        let space = input.of(&[0x0106, 0x0106, 0x0111]);
        let address = sockaddr(SocketAddr::new([127, 0, 0, 1].into(), input.of(&[7003, 7004])));
        let listener = self.create(server, space, 100)?;
        if self.command(server, BIND, &of(BIND, listener, &[(8, &address)])).is_ok() {
            let _ = self.command(server, LISTEN, &of(LISTEN, listener, &[(4, &[2])]));
        }
        let id = self.create(client, space, 200)?;
        self.command(client, RESOLVE_ADDR, &of(RESOLVE_ADDR, id, &[(144, &address)])).ok()?;
        self.command(client, RESOLVE_ROUTE, &of(RESOLVE_ROUTE, id, &[])).ok()?;
        let given: [(usize, &[u8]); 2] = [(0, &[5]), (271, &[1])];
        self.command(client, CONNECT, &of(CONNECT, id, &given)).ok()?;
        let next = input.u8() % 4;
        if next == UNREAD {
            return Some(());
        }
        self.wait(server);
        let child = self.files[server].ids.last()?.number;
        if next == ACCEPTED {
            let given: [(usize, &[u8]); 3] = [(0, &[50]), (8, &[6]), (279, &[1])];
            self.command(server, ACCEPT, &of(ACCEPT, child, &given)).ok()?;
            self.wait(client);
        }
        Some(())
    }

    /// An id for datagrams joins two groups.
    fn meet(&mut self, file: usize) -> Option<()> {
        let id = self.create(file, 0x0111, 300)?;
        let ip = |ip: [u8; 4]| sockaddr(SocketAddr::new(ip.into(), 7005));
        let near = of(RESOLVE_ADDR, id, &[(144, &ip([127, 0, 0, 1]))]);
        self.command(file, RESOLVE_ADDR, &near).ok()?;
        for last in [3, 4] {
            let group = ip([239, 1, 2, last]);
            let response = RESPONSE.to_ne_bytes();
            let parts: [(usize, &[u8]); 4] =
                [(0, &response), (8, &[40 + last]), (20, &[16]), (24, &group)];
            self.command(file, JOIN, &of(JOIN, id, &parts)).ok()?;
        }
        Some(())
    }

    fn step(&mut self, input: &mut Input<'_>) {
        let file = usize::from(input.u8()) % self.files.len();
        match input.u8() % 16 {
            0 => self.open(),
            1 if input.u8().is_multiple_of(8) && self.files.len() > 1 => self.close(file),
            1 => {
                let (number, len, room) = (input.u8() % 26, input.u16(), input.u16());
                let body = input.slice(usize::from(len) % 320);
                let len = if room % 4 == 3 { len } else { body.len() as u16 };
                let _ = self.raw(file, number.into(), (len, room), body);
            }
            2..5 if self.ids() >= IDS_MAX => {}
            4 => {
                let _: Option<()> = self.meet(file);
            }
            2 | 3 => {
                let other = usize::from(input.u8()) % self.files.len();
                let _: Option<()> = self.talk((file, other), input);
            }
            5 => self.wait(file),
            6 => {
                let _ = self.read_event(file);
            }
            7 => self.compose(file, MIGRATE, input),
            8 => self.compose(file, ACCEPT, input),
            _ => {
                self.compose(file, usize::from(input.u8()) % SHAPES.len(), input);
            }
        }
    }

    /// Destroys all, and closes all.
    fn end(&mut self) {
        for file in 0..self.files.len() {
            while let Some(id) = self.files[file].ids.last().map(|id| id.number) {
                self.command(file, DESTROY, &of(DESTROY, id, &[])).expect("the id is there");
            }
            assert_eq!(self.read_event(file), Err(libc::EAGAIN), "an event without an id");
        }
        if !self.is_uncounted {
            assert_eq!(self.counted, self.read, "events that were counted, and that were read");
        }
        while !self.files.is_empty() {
            self.close(0);
        }
        let nothing = Left { files: 1, ids: 0, groups: 0, ports: 0 };
        assert_eq!(self.cm.left(), nothing, "the objects left");
    }
}

pub(super) fn run(data: &[u8]) {
    let mut input = Input(data);
    let cm = PROCESS.lock().unwrap_or_else(PoisonError::into_inner);
    let (files, read, counted, is_uncounted) = (Vec::new(), 0, 0, false);
    let mut program = Program { cm: &cm, files, read, counted, is_uncounted };
    program.open();
    program.open();
    let mut steps = 0;
    while !input.is_empty() && steps < 200 {
        steps += 1;
        program.step(&mut input);
    }
    program.end();
}

pub(super) fn corpus() -> Vec<Vec<u8>> {
    // A request from the first file to the second, of each kind: it is accepted, or refused; its
    // listener goes first, or moves to the first file with an unread request; the events are read;
    // the connection ends, and so do the ids.
    const FIRST: u8 = 4;
    const LAST: u8 = 2;
    let wait = |file: u8| [file, 5];
    let mut all = vec![vec![0, 4, 0, 4, 0, 6, 0, 9, 17, 0, 0, 0, 0, 0, 0, 6, 0, 6]];
    for space in [0, 2] {
        let talk = |next: u8| [1, 2, 0, space, 0, next];
        // The choices of the shape, the id, no damage.
        let accept = [1, 8, 1, 0, 0, 0, LAST, 0, 0];
        let reject = [1, 9, 9, 0, 0, LAST, 0, 0];
        let disconnect = [0, 9, 10, LAST, 0, 0];
        let attr = [0, 9, 11, 2, LAST, 0, 0];
        let destroy = |file: u8, which: u8| [file, 9, 1, which, 0, 0];
        let migrate = [0, 7, 1, FIRST, 0, 0];
        let parts: [&[&[u8]]; 5] = [
            &[
                &talk(ACCEPTED),
                &wait(0),
                &wait(0),
                &wait(1),
                &attr,
                &disconnect,
                &wait(1),
                &wait(0),
            ],
            &[&talk(READ), &wait(0), &wait(0), &accept, &wait(0), &wait(1), &destroy(0, LAST)],
            &[&talk(READ), &wait(0), &wait(0), &reject, &wait(0)],
            &[&talk(UNREAD), &wait(0), &wait(0), &destroy(1, FIRST), &wait(0)],
            &[&talk(UNREAD), &migrate, &wait(0), &wait(0), &wait(0), &wait(0), &accept],
        ];
        all.extend(parts.map(|parts| parts.concat()));
    }
    all.extend((0..48u64).map(|seed| {
        let mut random = super::Random::new(seed + 9000);
        let len = 100 + random.below(900);
        (0..len).map(|_| random.below(256) as u8).collect()
    }));
    all
}
