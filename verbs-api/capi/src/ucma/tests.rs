//! Two ids, listeners or groups that share a file or a device; what a refused command leaves; and
//! addresses with scopes. Commands as librdmacm writes them, on loopback.

use std::net::{IpAddr, Ipv6Addr, SocketAddr, SocketAddrV6};
use std::os::fd::AsFd as _;

use rocinante_stack::types::{Mtu, Psn, Qpn};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::devices::Opened;
use super::event::Kind;
use super::id::{Earlier, ToId, ToListener};
use super::words::SOCKADDR_IN6;
use super::*;
use crate::devices;
use crate::plain::{Asked, CmEvent, ConnId, ListenerId, QpSide, Request, ServiceId};
use crate::plain::{Owner as _, SidrReqId, Transport};

const TCP: u16 = 0x0106;
const UDP: u16 = 0x0111;

/// Takes all answers, and has zeroes.
struct Zeroes;

impl Memory for Zeroes {
    fn check(&self, _: u64, _: usize, _: bool) -> Outcome<()> {
        Ok(())
    }

    fn load(&self, _: u64, len: usize) -> Outcome<Vec<u8>> {
        Ok(vec![0; len])
    }
}

/// A program with a file, which has loopback as its one device.
struct Program {
    it: Arc<Ucma>,
    file: Arc<File>,
    fd: c_int,
}

impl Drop for Program {
    fn drop(&mut self) {
        let is_closed = self.it.close(self.fd);
        if !std::thread::panicking() {
            assert_eq!((is_closed, self.it.counts()), (true, [0; 4]), "nothing stays");
        }
    }
}

fn v4(address: &str) -> SocketAddr {
    address.parse().unwrap()
}

impl Program {
    fn new() -> Self {
        let it = Arc::new(Ucma::with_devices(devices::limited(Some("lo")).unwrap()));
        let fd = it.open().unwrap();
        let file = it.file(fd).unwrap();
        Self { it, file, fd }
    }

    fn command(&self, number: u32, Out(body): Out) -> Outcome<Vec<u8>> {
        let len = u16::try_from(body.len()).unwrap();
        let bytes = Out::default().u32(number).u16(len).u16(1024).bytes(&body).0;
        Ok(self.it.command(&self.file, &bytes, &Zeroes)?.bytes)
    }

    fn number(answer: &[u8]) -> u32 {
        In(answer).u32(0)
    }

    fn create(&self, uid: u64, space: u16) -> u32 {
        let made = self.command(0, Out::default().u64(uid).u64(0).u16(space).until(24)).unwrap();
        Self::number(&made)
    }

    fn id(&self, number: u32) -> Arc<Id> {
        self.it.table.find(number, &self.file).unwrap()
    }

    fn bind(&self, id: u32, address: SocketAddr) -> Outcome<()> {
        let out = Out::default().u32(id).u32(SOCKADDR_IN6 as u32).address(Some(address), 128);
        self.command(20, out).map(drop)
    }

    fn bound(&self, uid: u64, space: u16, address: SocketAddr) -> u32 {
        let id = self.create(uid, space);
        self.bind(id, address).unwrap();
        id
    }

    /// Its number of events that were read.
    fn destroy(&self, id: u32) -> u32 {
        let answer = self.command(1, Out::default().u64(0).u32(id).u32(0)).unwrap();
        Self::number(&answer)
    }

    fn join(&self, id: u32, uid: u64, group: SocketAddr) -> Outcome<u32> {
        let out = Out::default().u64(0).u64(uid).address(Some(group), SOCKADDR_IN6).u32(id);
        self.command(16, out).map(|answer| Self::number(&answer))
    }

    fn leave(&self, group: u32) -> Outcome<u32> {
        let answer = self.command(17, Out::default().u64(0).u32(group).u32(0))?;
        Ok(Self::number(&answer))
    }

    /// Without parameters of a connection but its private data.
    fn accept(&self, id: u32, uid: u64, private: u8) -> Outcome<()> {
        let out = Out::default().u64(uid).until(8 + 264).u8(private).until(8 + 271).u8(1);
        self.command(8, out.until(280).u32(id).u32(0)).map(drop)
    }

    fn is_readable(&self) -> bool {
        let bell = self.file.bell();
        poll(&mut [PollFd::new(&bell.as_fd(), PollFlags::IN)], Some(&Timespec::default())) == Ok(1)
    }

    /// The next event: the program's name for its id, its number, and its kind.
    fn event(&self) -> Option<(u64, u32, u32)> {
        let is_readable = self.is_readable();
        let read = self.command(12, Out::default().u64(0)).ok();
        assert_eq!(read.is_some(), is_readable, "readable exactly while there are some");
        let read = read?;
        Some((In(&read).u64(0), In(&read).u32(8), In(&read).u32(12)))
    }

    fn opened(&self) -> Arc<Opened> {
        let found = self.it.devices.all().unwrap().remove(0);
        self.it.open_device(&found, true).unwrap()
    }

    /// What gets the requests of a listener with this backlog at an address.
    fn listener(&self, id: u32, local: SocketAddr, backlog: usize) -> (ToListener, Arc<Opened>) {
        let (id, opened) = (self.id(id), self.opened());
        id.facts.lock().backlog = backlog;
        let (table, of) = (self.it.table.clone(), Arc::downgrade(&opened));
        (ToListener { id, local, opened: of, table }, opened)
    }
}

const SIDE: QpSide = QpSide::new(Qpn::new(17), Psn::new(1));

fn request(local: IpAddr, peer: SocketAddr) -> CmEvent {
    let request = Request {
        local,
        peer,
        service: ServiceId::of_port(PortSpace::Tcp, 7471),
        side: SIDE,
        transport: Transport::Rc,
        mtu: Mtu::Mtu1024,
        ack_timeout: 14,
        retry_count: 7,
        traffic_class: 0,
        private: vec![7; 56],
    };
    let (listener, conn) = (ListenerId(1), ConnId(Default::default()));
    CmEvent::Request { listener, conn, request: Box::new(request) }
}

fn question(local: IpAddr, peer: SocketAddr) -> CmEvent {
    let service = ServiceId::of_port(PortSpace::Udp, 7471);
    let asked = Box::new(Asked { local, peer, service, private: vec![7; 180] });
    CmEvent::Asked { listener: ListenerId(1), ask: SidrReqId(1), asked }
}

/// Ids of one file: the end of one takes its events along, and no others.
#[test]
fn events_of_one_id_stay_when_another_goes() {
    for (gone, left) in [(0, 1), (1, 0)] {
        let program = Program::new();
        let ids = [1, 2].map(|uid| program.create(uid, TCP));
        for _ in 0..2 {
            for id in ids {
                program.id(id).tell(Kind::AddrError, 0, Default::default());
            }
        }
        let first = program.event().expect("an event");
        assert_eq!((first.0, first.1), (1, ids[0]));
        // It says how many of its events the program has read.
        assert_eq!(program.destroy(ids[gone]), u32::from(gone == 0));
        let rest = [program.event(), program.event(), program.event()];
        let its = Some((left as u64 + 1, ids[left], Kind::AddrError as u32));
        assert_eq!(rest, [its, if left == 1 { its } else { None }, None], "{gone}");
        assert_eq!(program.destroy(ids[left]), 2);
    }
}

/// Listeners of one file: each has as much room as it said, and a request that was read counts no
/// more.
#[test]
fn the_backlog_of_a_listener_is_its_own() {
    for space in [TCP, UDP] {
        let program = Program::new();
        let peer = v4("127.0.0.2:1");
        let local = [7471, 7472].map(|port| SocketAddr::new([127, 0, 0, 1].into(), port));
        let ids = [1, 2].map(|uid| program.create(uid, space));
        let [one, two] = [0, 1].map(|at| program.listener(ids[at], local[at], at + 1));
        let come = |to: &(ToListener, Arc<Opened>)| {
            to.0.put(if space == TCP { request } else { question }(to.0.local.ip(), peer)).is_some()
        };
        assert_eq!(
            [come(&one), come(&one), come(&two), come(&two), come(&two)],
            [true, false, true, true, false]
        );
        let counts = program.it.counts();
        assert_eq!(counts[1], 5, "a request that is refused makes no id");
        let (of, child, kind) = program.event().expect("the first request");
        assert_eq!((of, kind), (1, Kind::ConnectRequest as u32));
        assert_eq!([come(&two), come(&one), come(&one)], [false, true, false]);
        // The end of a listener takes the requests along that were not read, and no others.
        program.destroy(ids[0]);
        assert_eq!(program.it.counts()[1], 4);
        program.id(child);
        assert_eq!([come(&one), come(&two)], [false, false]);
        assert_eq!([program.event(), program.event()].map(|it| it.expect("its").0), [2, 2]);
        assert_eq!(program.event(), None);
        assert!(come(&two));
    }
}

/// A peer on a link, and the own address there, have the link as their scope; others have none.
#[test]
fn both_addresses_of_a_request_have_the_scope_of_their_link() {
    let program = Program::new();
    let scope = program.opened().found.interface.index;
    for (local, peer, scopes) in [
        ("fe80::1", "[fe80::2]:9", [scope, scope]),
        ("fd00::1", "[fd00::2]:9", [0, 0]),
        ("fd00::1", "[fe80::2]:9", [0, scope]),
        ("::1", "[::1]:9", [0, 0]),
    ] {
        let local: Ipv6Addr = local.parse().unwrap();
        for (space, of) in [(TCP, request as fn(_, _) -> _), (UDP, question)] {
            let id = program.create(1, space);
            let at = SocketAddrV6::new(local, 7471, 0, scopes[0]);
            let (to, _opened) = program.listener(id, at.into(), 1);
            assert!(to.put(of(local.into(), v4(peer))).is_some());
            let (_, child, _) = program.event().expect("a request");
            let held = program.id(child);
            let held = held.held.lock();
            let ends = [held.local, held.peer].map(|it| match it {
                Some(SocketAddr::V6(it)) => (*it.ip(), it.port(), it.scope_id()),
                it => panic!("{it:?}"),
            });
            let SocketAddr::V6(peer) = v4(peer) else { panic!() };
            assert_eq!(ends, [(local, 7471, scopes[0]), (*peer.ip(), 9, scopes[1])], "{local}");
            drop(held);
            for id in [child, id] {
                program.destroy(id);
            }
        }
    }
}

/// Of two groups of an id each is left by itself, whichever way; and nothing of one stays.
#[test]
fn a_group_that_is_left_leaves_the_others() {
    let program = Program::new();
    let (near, other) = (v4("127.0.0.1:0"), v4("[::1]:0"));
    let groups = ["239.1.2.3:0", "239.1.2.4:0"].map(v4);
    let six = ["[ff15::1]:0", "[ff15::2]:0"].map(v4);
    for (address, groups) in [(near, groups), (other, six)] {
        let id = program.create(1, UDP);
        assert_eq!(program.join(id, 7, groups[0]), Err(libc::EINVAL), "it has no address");
        program.bind(id, address).unwrap();
        let held = program.id(id);
        // An id of loopback has no device before it resolves an address.
        let opened = program.opened();
        held.held.lock().found = Some(opened.found.clone());
        for order in [[0, 1], [1, 0]] {
            let joined = [0, 1].map(|at| program.join(id, at as u64 + 7, groups[at]).unwrap());
            let first = program.event().expect("the first is joined");
            assert_eq!(first, (7, joined[0], Kind::MulticastJoin as u32));
            // The second's event is not read: it goes with it.
            assert_eq!(program.leave(joined[order[0]]), Ok(u32::from(order[0] == 0)));
            let left: Vec<u32> = held.held.lock().groups.iter().map(|it| it.number).collect();
            assert_eq!(left, [joined[order[1]]]);
            assert_eq!(program.it.counts()[2], 1);
            assert_eq!(program.leave(joined[order[0]]), Err(libc::ENOENT));
            assert_eq!(program.event().is_some(), order[0] == 0);
            assert_eq!(program.leave(joined[order[1]]), Ok(1));
            assert_eq!((held.held.lock().groups.len(), program.it.counts()[2]), (0, 0));
        }
        program.join(id, 7, groups[0]).unwrap();
        program.destroy(id);
        assert_eq!((program.it.counts()[2], program.event()), (0, None));
    }
}

/// An answer that cannot be sent leaves the id as one that is no program's yet: later events of it
/// go to none.
#[test]
fn an_accept_that_is_refused_makes_the_id_no_programs() {
    for (space, of) in [(TCP, request as fn(_, _) -> _), (UDP, question)] {
        let program = Program::new();
        let (local, id) = (v4("127.0.0.1:7471"), program.create(1, space));
        let (to, _opened) = program.listener(id, local, 1);
        assert!(to.put(of(local.ip(), v4("127.0.0.2:1"))).is_some());
        let (_, child, _) = program.event().expect("a request");
        for _ in 0..2 {
            program.accept(child, 9, 255).expect_err("too much private data, and no such request");
            assert_eq!(program.id(child).facts.lock().uid, 0);
            ToId(program.id(child)).put(CmEvent::Established { conn: ConnId(Default::default()) });
            assert_eq!(program.event(), None);
        }
    }
}

/// As the kernel has it: a scope that names no device is ENODEV, an address that is elsewhere
/// EADDRNOTAVAIL.
#[test]
fn a_link_local_address_is_looked_for_at_its_scope() {
    let program = Program::new();
    let id = program.create(1, TCP);
    let lo = rocinante_netdev::Interface::by_name("lo").unwrap().index;
    for (scope, error) in
        [(0, libc::EINVAL), (0x7fff_fff0, libc::ENODEV), (lo, libc::EADDRNOTAVAIL)]
    {
        let address = SocketAddrV6::new("fe80::77".parse().unwrap(), 7471, 0, scope);
        assert_eq!(program.bind(id, address.into()), Err(error), "{scope}");
    }
    program.bind(id, v4("127.0.0.1:0")).unwrap();
}

/// An address that is not found gives the id back the one that it had, on its port, too: what was
/// in the way of others is so again, and nothing else.
#[test]
fn an_address_that_is_not_found_leaves_the_one_before() {
    use super::resolving::settle;

    for (before, during, error) in [
        ("0.0.0.0:0", "127.0.0.1", libc::EADDRNOTAVAIL),
        ("[::]:0", "::1", libc::EADDRNOTAVAIL),
        ("127.0.0.1:0", "127.0.0.1", libc::EADDRINUSE),
        ("[::1]:0", "::1", libc::EADDRINUSE),
    ] {
        let program = Program::new();
        let number = program.bound(1, TCP, v4(before));
        let id = program.id(number);
        let mut held = id.held.lock();
        let local = held.local.unwrap();
        let during = SocketAddr::new(during.parse().unwrap(), local.port());
        program.it.ports.lock().change(id.space, &held.bound(&id, during)).unwrap();
        held.local = Some(during);
        held.phase = Phase::AddrQuery(Earlier { local: Some(local), ..Earlier::default() });
        drop(held);
        settle(&Arc::downgrade(&program.it), &id, Err(libc::ETIMEDOUT));
        let event = program.event().expect("it is told");
        assert_eq!(event, (1, number, Kind::AddrError as u32));
        let held = id.held.lock();
        assert_eq!((held.local, matches!(held.phase, Phase::Bound)), (Some(local), true));
        drop(held);
        // At another address of the family, and at the same.
        let other = if local.is_ipv4() { "127.0.0.2" } else { "fd00::77" };
        let other = SocketAddr::new(other.parse().unwrap(), local.port());
        let bind = |address| {
            let second =
                program.it.table.make((id.space, id.qp_type), (2, program.file.clone()), |_, _| {});
            let second = second.unwrap();
            let of = second.held.lock().bound(&second, address);
            let bound = program.it.ports.lock().bind(id.space, of);
            program.it.ports.lock().release(id.space, local.port(), second.number);
            program.it.table.remove(second.number);
            bound.map(drop)
        };
        assert_eq!(bind(during), Err(error), "{before}");
        let is_any = local.ip().is_unspecified();
        assert_eq!(bind(other), if is_any { Err(error) } else { Ok(()) }, "{before}");
        program.destroy(number);
        assert_eq!(bind(during), Ok(()));
    }
}

/// All that commands can change of an id, of its file, and of the tables. Whether its device is
/// open is not seen.
fn state(program: &Program, id: &Arc<Id>) -> String {
    let held = id.held.lock();
    let phase = match &held.phase {
        Phase::Idle => "idle".into(),
        Phase::Bound => "bound".into(),
        Phase::AddrQuery(_) => "address asked for".into(),
        Phase::AddrResolved => "address resolved".into(),
        Phase::RouteResolved => "route resolved".into(),
        Phase::Listening(places) => format!("listening at {}", places.len()),
        Phase::Requested(conn) => format!("requested {conn:?}"),
        Phase::Asked(ask) => format!("asked {ask:?}"),
        Phase::Connected(conn) => format!("connected {conn:?}"),
        Phase::Querying(query) => format!("querying {query:?}"),
        Phase::Answered => "answered".into(),
        Phase::Removed => "removed".into(),
        Phase::Destroyed => "destroyed".into(),
    };
    let groups: Vec<u32> = held.groups.iter().map(|it| it.number).collect();
    let ends = (held.local, held.peer, held.found.as_ref().map(|it| &it.name), held.has_port);
    let options = (held.reuse, held.one_family, held.tos, held.ack_timeout, held.psn, held.qkey);
    let facts = id.facts.lock();
    let of = (facts.uid, facts.is_alive, facts.is_removed, facts.is_told, facts.backlog);
    let rest = (of, facts.route, facts.ah, program.it.counts(), program.is_readable());
    let ports = format!("{:?}", program.it.ports.lock().owners(id.number));
    format!("{phase}: {ends:?} {options:?} {groups:?} {rest:?} {ports}")
}

/// Each command on an id in each state, with what it does not take: the id, its file and the tables
/// stay as they are.
#[test]
fn a_refused_command_leaves_all_as_it_was() {
    const PHASES: usize = 12;
    let program = Program::new();
    let local = v4("127.0.0.1:0");
    // An id that is so far.
    let come = |space, phase: usize| {
        let requested = |of: fn(_, _) -> _| {
            let listener = program.create(1, space);
            let (to, _opened) = program.listener(listener, local, 1);
            assert!(to.put(of(local.ip(), v4("127.0.0.2:1"))).is_some());
            let child = program.event().expect("a request").1;
            program.destroy(listener);
            child
        };
        match (phase, space) {
            (8, TCP) => return requested(request),
            (8, _) => return requested(question),
            _ => {}
        }
        let id = program.create(1, space);
        let it = program.id(id);
        match phase {
            0 => {}
            1 => program.bind(id, local).unwrap(),
            2 => program.bind(id, v4("[::1]:0")).unwrap(),
            3 => program.bind(id, v4("0.0.0.0:0")).unwrap(),
            4..=6 => {
                let of = |number, out| program.command(number, out).map(drop).unwrap();
                of(
                    21,
                    Out::default()
                        .u32(id)
                        .u32(1000)
                        .u16(0)
                        .u16(16)
                        .until(144)
                        .address(Some(v4("127.0.0.1:9")), 128),
                );
                if phase > 4 {
                    of(4, Out::default().u32(id).u32(1000));
                }
                if phase == 6 {
                    it.held.lock().phase = Phase::Connected(ConnId(Default::default()));
                }
            }
            7 => {
                program.bind(id, local).unwrap();
                program.command(7, Out::default().u32(id).u32(3)).map(drop).unwrap();
            }
            9 => it.held.lock().phase = Phase::Answered,
            10 => it.held.lock().phase = Phase::Removed,
            _ => it.facts.lock().is_removed = true,
        }
        while program.event().is_some() {}
        id
    };
    let addresses = [
        None,
        Some(v4("203.0.113.9:7")),
        Some(v4("[2001:db8::9]:7")),
        Some(v4("[fe80::9]:7")),
        Some(v4("127.0.0.1:7472")),
        Some(v4("[::1]:7472")),
        Some(v4("239.1.2.3:0")),
        Some(v4("0.0.0.0:0")),
    ];
    let param = |out: Out, private, is_given| {
        let at = out.0.len();
        out.until(at + 264).u8(private).until(at + 271).u8(is_given)
    };
    // Each command but those that make or destroy an id, take an event or answer a question.
    let commands = |id: u32| {
        let mut all = Vec::new();
        for address in addresses {
            let in_6 = |out: Out| out.address(address, SOCKADDR_IN6);
            all.push((2, in_6(Out::default().u64(0)).u32(id)));
            all.push((20, Out::default().u32(id).u32(0).address(address, 128)));
            for from in addresses {
                all.push((3, in_6(Out::default().address(from, SOCKADDR_IN6)).u32(id).u32(1)));
                let out = Out::default().u32(id).u32(1).u16(28).u16(28).u32(0);
                all.push((21, out.address(from, 128).address(address, 128)));
            }
            all.push((16, in_6(Out::default().u64(0).u64(9)).u32(id)));
            all.push((
                22,
                Out::default().u64(0).u64(9).u32(id).u16(0).u16(2).address(address, 128),
            ));
            all.push((
                22,
                Out::default().u64(0).u64(9).u32(id).u16(0).u16(1).address(address, 128),
            ));
        }
        all.push((4, Out::default().u32(id).u32(1)));
        for (private, is_given) in [(0, 0), (0, 1), (255, 1), (181, 1)] {
            all.push((6, param(Out::default(), private, is_given).u32(id).u32(0)));
            all.push((8, param(Out::default().u64(9), private, is_given).u32(id).u32(0)));
            all.push((9, Out::default().u32(id).u8(private).u8(is_given).until(264)));
        }
        all.push((10, Out::default().u32(id).u32(0)));
        all.extend((0..6).map(|state| (11, Out::default().u64(0).u32(id).u32(state))));
        for (level, name, len) in [(0, 0, 4), (0, 1, 1), (0, 1, 4), (0, 2, 4), (0, 3, 2), (1, 0, 1)]
        {
            let out = Out::default().u64(0).u32(id).u32(level).u32(name).u32(len).u32(0);
            all.push((14, out));
        }
        all.push((15, Out::default().u32(id).u32(4)));
        all.push((15, Out::default().u32(id).u32(5)));
        all.push((18, Out::default().u64(0).u32(id).u32(u32::MAX)));
        all.push((7, Out::default().u32(id).u32(1)));
        all
    };
    let mut refused = 0;
    for space in [TCP, UDP] {
        for phase in 0..PHASES {
            let mut id = come(space, phase);
            let mut all = commands(id);
            for nth in 0..all.len() {
                let (number, out) = std::mem::take(&mut all[nth]);
                let it = program.it.table.ids_of(None).into_iter().find(|it| it.number == id);
                let it = it.unwrap();
                let before = state(&program, &it);
                let name = COMMANDS[number as usize].0;
                match program.command(number, out) {
                    Err(errno) => {
                        let what = format!("{name} {nth}, {phase} of {space:x}: {errno}");
                        assert_eq!(state(&program, &it), before, "{what}");
                        refused += 1;
                    }
                    Ok(_) => {
                        program.it.destroy(&it);
                        while program.event().is_some() {}
                        id = come(space, phase);
                        all = commands(id);
                    }
                }
            }
            let it = program.it.table.ids_of(None).into_iter().find(|it| it.number == id);
            program.it.destroy(&it.unwrap());
        }
    }
    assert!(refused > 1000, "{refused}");
}

/// Memory of a program that closes a file when it is looked at.
struct Closing<'a>(&'a Program, c_int);

impl Memory for Closing<'_> {
    fn check(&self, _: u64, _: usize, _: bool) -> Outcome<()> {
        self.0.it.close(self.1);
        Ok(())
    }

    fn load(&self, _: u64, len: usize) -> Outcome<Vec<u8>> {
        Ok(vec![0; len])
    }
}

/// A thread closes a file while another has given it a command.
#[test]
fn a_command_that_its_file_does_not_outlive_leaves_nothing() {
    let program = Program::new();
    let other = || {
        let fd = program.it.open().unwrap();
        (fd, program.it.file(fd).unwrap())
    };
    let give = |(fd, file): &(c_int, Arc<File>), number, Out(body): Out| {
        let len = u16::try_from(body.len()).unwrap();
        let bytes = Out::default().u32(number).u16(len).u16(1024).bytes(&body).0;
        program.it.command(file, &bytes, &Closing(&program, *fd)).map(drop)
    };
    let all = program.it.counts();
    let _ = give(&other(), 0, Out::default().u64(1).u64(0).u16(TCP).until(24));
    assert_eq!(program.it.counts(), all, "CREATE_ID");
    // A request that is read.
    let listener = program.create(1, TCP);
    let (to, _opened) = program.listener(listener, v4("127.0.0.1:7471"), 1);
    let reads = other();
    to.id.facts.lock().file = reads.1.clone();
    assert!(to.put(request([127, 0, 0, 1].into(), v4("127.0.0.2:1"))).is_some());
    let _ = give(&reads, 12, Out::default().u64(0));
    assert_eq!(program.it.counts(), all, "GET_EVENT");
    // An id that comes from another file.
    let (fd, gone) = other();
    program.it.close(fd);
    let id = program.create(1, TCP);
    let from = u32::try_from(program.fd).unwrap();
    let _ = give(&(fd, gone), 18, Out::default().u64(0).u32(id).u32(from));
    assert_eq!(program.it.counts(), all, "MIGRATE_ID");
}
