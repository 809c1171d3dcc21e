//! The lab without root. The test runs itself once more as the user `nobody`. That process enters a
//! user namespace and uses everything there.
//!
//! It has a `main` of its own, because only a process with a single thread can enter a user
//! namespace.

use rocinante_lab::{Availability, Lab, LabConfig, Match, Privilege, Tbf, enter_user_namespace};
use std::fs;
use std::net::UdpSocket;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::time::Duration;

const NAME: &str = "unprivileged::lab_in_a_user_namespace";
const NOBODY: u32 = 65534;
/// The exit code of the unprivileged half if it cannot run here.
const CANNOT: i32 = 75;

fn main() -> ExitCode {
    // As the harness does for `cargo test -- --list` and for filters.
    let mut args = std::env::args().skip(1);
    match args.next().as_deref() {
        Some("as-nobody") => as_nobody(),
        Some("--list") => println!("{NAME}: test"),
        Some(filter) if !filter.starts_with('-') && !NAME.contains(filter) => {}
        _ => return run_as_nobody(),
    }
    ExitCode::SUCCESS
}

fn run_as_nobody() -> ExitCode {
    if rocinante_tests::need::machine_root().is_err() {
        // There is no other user to become: this user's own namespace is enough.
        return verdict(Command::new(own_path()).arg("as-nobody"));
    }
    // A copy of this program where every user can run it.
    let folder = rocinante_tests::running::open_to_all();
    let copy = folder.path().join("test");
    fs::copy(own_path(), &copy).unwrap();
    verdict(Command::new(copy).arg("as-nobody").current_dir("/").uid(NOBODY).gid(NOBODY))
}

fn verdict(command: &mut Command) -> ExitCode {
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    let skipped = output.status.code() == Some(CANNOT);
    if skipped {
        rocinante_tests::skip::report(NAME, &said);
    }
    // The harness counts skipped tests as passed; so does this.
    let ok = skipped || output.status.success();
    let (word, passed) = if ok { ("ok", 1) } else { ("FAILED", 0) };
    println!("\nrunning 1 test\ntest {NAME} ... {word}\n{said}");
    println!(
        "test result: {word}. {passed} passed; {} failed; 0 ignored; 0 measured; 0 filtered out\n",
        1 - passed
    );
    if ok { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn own_path() -> PathBuf {
    std::env::current_exe().unwrap()
}

/// The test itself, which starts without privilege.
fn as_nobody() {
    match enter_user_namespace() {
        Ok(privilege) => assert_eq!(privilege, Privilege::UserNamespace),
        Err(error) => {
            eprint!("{error}");
            std::process::exit(CANNOT);
        }
    }
    let available = Availability::probe();
    assert_eq!(available.privilege, Some(Privilege::UserNamespace));
    assert_eq!((&available.lab, &available.nft, &available.tc), (&Ok(()), &Ok(()), &Ok(())));

    let lab = Lab::new(&LabConfig::default()).unwrap();
    let seen = lab.count(&Match::roce()).unwrap();
    let shaper = lab.shape(1, &Tbf::mbit(100)).unwrap();
    let [a, b] = [0, 1].map(|i| {
        let container = lab.container(i);
        container.run(|| UdpSocket::bind((container.ipv4(), 4791))).unwrap().unwrap()
    });
    b.set_read_timeout(Some(Duration::from_secs(2))).unwrap();
    a.send_to(b"hello", b.local_addr().unwrap()).unwrap();
    let mut buf = [0; 16];
    assert_eq!(b.recv(&mut buf).unwrap(), 5);
    assert_eq!(seen.counter().unwrap().packets, 1);
    assert!(shaper.stats().unwrap().packets >= 1);
}
