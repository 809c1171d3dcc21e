//! Programs that have the calls of others wait: neighbours, and other users of the namespace.

use std::io::Write as _;
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd as _;
use std::sync::mpsc;

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::net::{SocketAddrUnix, SocketFlags, connect, sockopt};
use rustix::process::{PidfdFlags, getpid, pidfd_open};

use super::guardians::{left, ward};
use super::*;
use crate::kernel::rights;
use crate::sharing::guardian::Guardian;
use crate::sharing::rendezvous::{SPACE, name, seqpacket};
use crate::testing::testns::as_user;

const NOBODY: u32 = 65534;
/// Far less than a socket lingers, and far more than anything here takes.
const BOUND: Duration = Duration::from_secs(20);

/// Ends in time, or fails.
fn in_time<T: Send + 'static>(what: &str, work: impl FnOnce() -> T + Send + 'static) -> T {
    let (send, result) = mpsc::channel();
    std::thread::spawn(move || send.send(work()));
    result.recv_timeout(BOUND).unwrap_or_else(|e| panic!("{what}: {e}"))
}

#[test]
fn a_neighbour_that_has_calls_on_the_listener_wait_keeps_no_process() {
    let here = loopback();
    let first = process(&[here], 1);
    let listener = &first.slots.shared[0].objects.listener;
    for _ in 0..3 {
        let flags = fcntl_getfl(listener).expect("flags");
        fcntl_setfl(listener, flags - OFlags::NONBLOCK).expect("set");
        let next = in_time("to join", move || process(&[here], 1));
        assert!(next.slots.first() > 0);
        in_time("to leave", move || drop(next));
    }
    in_time("to end", move || drop(first));
}

/// A socket of which the close waits until the other end reads, and the other end.
fn lingering() -> (OwnedFd, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a socket");
    let mut socket = TcpStream::connect(listener.local_addr().expect("bound")).expect("connected");
    let (other, _) = listener.accept().expect("connected");
    socket.set_nonblocking(true).expect("a socket");
    while socket.write(&[0; 65536]).is_ok() {}
    sockopt::set_socket_linger(&socket, Some(3 * BOUND)).expect("set");
    (socket.into(), other)
}

/// Another user connects there, and sends a descriptor whose close waits until the second result is
/// dropped.
fn send_lingering(to: &SocketAddrUnix) -> (Result<(), Option<i32>>, impl Sized + Send) {
    let (socket, other) = lingering();
    let connection = seqpacket(SocketFlags::CLOEXEC).expect("a socket");
    connect(&connection, to).expect("any user can");
    let sent = rights::send::<SPACE>(&connection, &[0], &[socket.as_fd()]);
    // The last copy is the receiver's, or else this one's.
    let kept = sent.is_err().then_some(socket);
    (sent.map_err(|e| e.raw_os_error()), (other, kept))
}

#[test]
fn another_user_has_no_process_wait() {
    let here = loopback();
    let first = process(&[here], 1);
    let names = [here.to_string(), format!("{here}/duty")].map(|text| name(&text).expect("a name"));
    let mut others = Vec::new();
    for to in &names {
        let (sent, other) = or_skip!(
            "shared::another_user_has_no_process_wait",
            as_user(NOBODY, || send_lingering(to))
        );
        // Linux before 6.16 takes it, unless the connection is closed already.
        assert!(matches!(sent, Ok(()) | Err(Some(libc::EPERM | libc::EPIPE))), "{sent:?}");
        others.push(other);
    }
    let second = in_time("to join", move || process(&[here], 1));
    in_time("to end", move || drop(first));
    in_time("to follow", move || {
        let mut second = second;
        follow(&mut [&mut second], &[here]);
    });
}

/// A guardian takes descriptors of its user's processes.
#[test]
fn another_user_has_no_guardian_wait() {
    let here = loopback();
    let (socket, name) = Guardian::socket().expect("a socket");
    let to = SocketAddrUnix::new_abstract_name(name.as_bytes()).expect("a name");
    // This user is the other one.
    let (sent, other) = send_lingering(&to);
    assert_eq!(sent, Ok(()));
    let (done, is_done) = mpsc::channel();
    let guarding = std::thread::spawn(move || {
        as_user(NOBODY, || {
            let own = pidfd_open(getpid(), PidfdFlags::empty()).expect("this process");
            done.send(left(&mut Guardian::new(socket, own)).len()).expect("it waits");
        })
    });
    let (first, told) = match as_user(NOBODY, || ward(&name, &[here], 1)) {
        Ok(ward) => ward,
        Err(e) => return println!("SKIPPED shared::another_user_has_no_guardian_wait: {e}"),
    };
    drop((first, told));
    assert_eq!(is_done.recv_timeout(BOUND), Ok(1), "the guardian waits for another user");
    drop(other);
    guarding.join().expect("no panic").expect("another user");
}
