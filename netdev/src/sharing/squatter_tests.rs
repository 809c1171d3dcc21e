//! Programs that have the names of an address and are no processes of ours: old ones, others, and
//! such as mean harm. Each is an error that names them, within a time that is bounded.

use std::fs::File;
use std::net::UdpSocket;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, listen, socket_with,
    sockopt,
};

use super::rendezvous::{name, seqpacket};
use super::tests::lease;
use super::*;
use crate::ROCE_PORT;
use crate::kernel::descriptors::patiently;
use crate::kernel::rights;
use crate::testing::loopback;
use crate::testing::sides::lo;
use crate::testing::testns::{as_user, or_skip};
use crate::udp::UdpPort;

/// Far beyond all that a process waits for.
const BOUND: Duration = Duration::from_secs(30);
const SPACE: usize = rustix::cmsg_space!(ScmRights(5));

/// The error of a process that joins meanwhile, which must name this one.
fn refused(here: IpAddr) -> String {
    let begin = Instant::now();
    let open = |slots: Arc<Slots>| {
        let own = Shards { first: slots.first(), shared: true, ..Shards::ONE };
        let sockets = slots.sockets(&[here])?;
        UdpPort::acquire(&lo(), &[here], &PortConfig::default(), own, Some(sockets)).map(drop)
    };
    let error = lease(&[here], 1).and_then(open).expect_err("it is not ours").to_string();
    assert!(begin.elapsed() < BOUND, "{error}");
    assert!(error.contains(&format!("pid {}", std::process::id())), "names nobody: {error}");
    error
}

fn squat(name: &SocketAddrUnix) -> OwnedFd {
    let socket = seqpacket(SocketFlags::CLOEXEC | SocketFlags::NONBLOCK).expect("a socket");
    // A child of another test may hold a copy of a closed socket between fork and exec.
    patiently(libc::EADDRINUSE, BOUND, || Ok(bind(&socket, name)?)).expect("the name is free");
    socket
}

fn name_of(here: IpAddr) -> SocketAddrUnix {
    name(&here.to_string()).expect("a name")
}

/// The same while a program answers there.
fn answered(here: IpAddr, answer: impl Fn(OwnedFd) + Sync) -> String {
    let listener = squat(&name_of(here));
    listen(&listener, 128).expect("listening");
    let over = AtomicBool::new(false);
    let error = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                match accept_with(&listener, SocketFlags::CLOEXEC) {
                    Ok(connection) => answer(connection),
                    Err(_) => std::thread::sleep(Duration::from_millis(1)),
                }
            }
        });
        let error = std::panic::catch_unwind(|| refused(here));
        over.store(true, Ordering::Relaxed);
        error
    });
    drop(listener);
    error.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// Nothing of it stays.
fn is_over(here: IpAddr) {
    assert_eq!(lease(&[here], 1).expect("it has gone").first(), 0);
}

/// The same where the answer has these descriptors.
fn given(here: IpAddr, all: &[BorrowedFd<'_>]) -> String {
    let error = answered(here, |connection| {
        // The one that asked may have hung up.
        let sent = rights::send::<SPACE>(&connection, &[0], all).map_err(|e| e.raw_os_error());
        assert!(matches!(sent, Ok(_) | Err(Some(libc::EPIPE))), "{sent:?}");
    });
    assert!(error.contains("is not as it should be"), "{error}");
    assert!(error.contains("end them, or use another address"), "{error}");
    error
}

fn memory(bytes: u64, seals: SealFlags) -> OwnedFd {
    let memory = memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING);
    let memory = memory.expect("made");
    ftruncate(&memory, bytes).expect("long enough");
    fcntl_add_seals(&memory, seals).expect("sealed");
    memory
}

#[test]
fn programs_that_do_not_answer_are_named() {
    let here = loopback();
    // It never listens; it listens, and answers no connection.
    let socket = squat(&name_of(here));
    let silent = |error: String| {
        assert!(error.contains("do not answer"), "{error}");
        assert!(error.contains("end them, or use another address"), "{error}");
    };
    silent(refused(here));
    listen(&socket, 128).expect("listening");
    silent(refused(here));
    // Its queue is full.
    listen(&socket, 0).expect("listening");
    silent(refused(here));
    drop(socket);
    // It hangs up, with a word or without.
    silent(answered(here, drop));
    // It keeps the connection.
    let kept = Mutex::new(Vec::new());
    silent(answered(here, |connection| kept.lock().expect("no panic").push(connection)));
    is_over(here);
}

#[test]
fn answers_with_other_descriptors_are_refused() {
    let here = loopback();
    let other = loopback();
    let ours = lease(&[other], 1).expect("a slot");
    let objects = &ours.shared[0].objects;
    let [reader, writer] = objects.sockets.ends();
    let good = [objects.listener.as_fd(), reader, writer, objects.memory.as_fd()];
    for count in 0..4 {
        given(here, &good[..count]);
    }
    given(here, &[&good[..], &good[..1]].concat());
    // Each of them is something else: a file, a socket, a pipe's end, a memory file.
    let null = OwnedFd::from(File::open("/dev/null").expect("there"));
    let udp = OwnedFd::from(UdpSocket::bind("127.0.0.1:0").expect("a socket"));
    let (pipe, _other) = std::io::pipe().expect("a pipe");
    let sealed = memory(layout::FILE_BYTES, SealFlags::SHRINK | SealFlags::GROW);
    for at in 0..4 {
        // As the file the last one would do.
        let others = [null.as_fd(), udp.as_fd(), pipe.as_fd(), sealed.as_fd()];
        for other in &others[..if at == 3 { 3 } else { 4 }] {
            let mut all = good;
            all[at] = *other;
            given(here, &all);
        }
    }
    // A file that can be shortened, or is short.
    for (bytes, seals) in [
        (layout::FILE_BYTES, SealFlags::empty()),
        (layout::FILE_BYTES, SealFlags::GROW),
        (layout::NOTES_AT - 1, SealFlags::SHRINK | SealFlags::GROW),
        (0, SealFlags::SHRINK | SealFlags::GROW),
    ] {
        let memory = memory(bytes, seals);
        given(here, &[good[0], good[1], good[2], memory.as_fd()]);
    }
    // Listeners that do not listen, or on which to accept would be to wait.
    let still = seqpacket(SocketFlags::CLOEXEC | SocketFlags::NONBLOCK).expect("a socket");
    let waits = seqpacket(SocketFlags::CLOEXEC).expect("a socket");
    bind(&waits, &name("test/waits").expect("a name")).expect("free");
    listen(&waits, 1).expect("listening");
    for listener in [&still, &waits] {
        given(here, &[listener.as_fd(), good[1], good[2], good[3]]);
    }
    is_over(here);
    assert!(lease(&[other], 1).is_ok(), "the real one has not suffered");
}

#[test]
fn a_bag_with_something_else_in_it_is_refused() {
    let here = loopback();
    let other = loopback();
    let ours = lease(&[other], 1).expect("a slot");
    let listener = ours.shared[0].objects.listener.as_fd();
    let memory = || memory(layout::FILE_BYTES, SealFlags::SHRINK | SealFlags::GROW);
    let with = |[reader, writer]: [BorrowedFd<'_>; 2]| {
        given(here, &[listener, reader, writer, memory().as_fd()]);
    };
    // Bytes without descriptors, and with too few.
    let (end, other) = UnixStream::pair().expect("a pair");
    rights::send::<SPACE>(&other, &[0], &[]).expect("sent");
    with([end.as_fd(), other.as_fd()]);
    let (end, other) = UnixStream::pair().expect("a pair");
    rights::send::<SPACE>(&other, &[0], &[end.as_fd()]).expect("sent");
    with([end.as_fd(), other.as_fd()]);
    // In the place of the UDP socket a stream that has ended.
    let (ended, _) = UnixStream::pair().expect("a pair");
    let udp = UdpSocket::bind("127.0.0.1:0").expect("a socket");
    for entry in [[ended.as_fd(); 3], [udp.as_fd(); 3]] {
        let (end, other) = UnixStream::pair().expect("a pair");
        rights::send::<SPACE>(&other, &[0], &entry).expect("sent");
        with([end.as_fd(), other.as_fd()]);
    }
    // Entries put into it are not there.
    let [(one, two), (other, end)] = [(); 2].map(|()| UnixStream::pair().expect("a pair"));
    with([one.as_fd(), other.as_fd()]);
    // Entries put into it are in their queues.
    drop((one, two, other, end));
    is_over(here);
    // The same behind a socket that is right: to empty it would take for ever.
    let first = socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None);
    let first = first.expect("a socket");
    sockopt::set_socket_reuseport(&first, true).expect("set");
    bind(&first, &std::net::SocketAddr::from((here, ROCE_PORT))).expect("free");
    let (end, other) = UnixStream::pair().expect("a pair");
    for socket in [first.as_fd(), ended.as_fd()] {
        rights::send::<SPACE>(&other, &[0], &[socket, end.as_fd(), end.as_fd()]).expect("sent");
    }
    with([end.as_fd(), other.as_fd()]);
}

#[test]
fn a_lead_that_another_program_has_is_an_error_that_names_it() {
    let here = loopback();
    let duty = name(&format!("{here}/duty")).expect("a name");
    let socket = squat(&duty);
    for listens in [false, true] {
        if listens {
            listen(&socket, 128).expect("listening");
        }
        let error = refused(here);
        assert!(
            error.contains("become the leader") && error.contains("end it yourself"),
            "{error}"
        );
    }
    drop(socket);
    is_over(here);
}

/// Names have the version of the shared objects: such a process is not met, but it has the port.
#[test]
fn a_group_of_another_version_has_the_port() {
    let here = loopback();
    let socket = socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None);
    let socket = socket.expect("a socket");
    sockopt::set_socket_reuseport(&socket, true).expect("set");
    bind(&socket, &std::net::SocketAddr::from((here, ROCE_PORT))).expect("free");
    let error = refused(here);
    assert!(error.contains("UDP/4791 is held by"), "{error}");
    assert!(error.contains("another address") || error.contains("close that device"), "{error}");
}

#[test]
fn another_user_is_named_whatever_it_does() {
    const NOBODY: u32 = 65534;
    let here = loopback();
    let listener = or_skip!(
        "shared::another_user_is_named",
        as_user(NOBODY, || {
            let socket = squat(&name_of(here));
            listen(&socket, 128).expect("listening");
            socket
        })
    );
    let error = refused(here);
    assert!(error.contains("user 65534"), "{error}");
    drop(listener);
    // One that has the lead alone.
    let duty = name(&format!("{here}/duty")).expect("a name");
    let listener = as_user(NOBODY, || {
        let socket = squat(&duty);
        listen(&socket, 128).expect("listening");
        socket
    });
    let error = refused(here);
    assert!(error.contains("user 65534") && error.contains("become the leader"), "{error}");
    drop(listener);
    is_over(here);
}
