//! The virtual machine itself: it boots, runs commands, shares a directory, and leaves nothing
//! behind.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use rocinante_interop::guest::{Guest, GuestConfig, Image, Link, control};
use rocinante_lab::{Lab, LabConfig};
use rocinante_tests::{need, require};

const SOON: Duration = Duration::from_secs(30);

#[test]
fn it_boots_runs_what_it_is_told_and_is_gone() {
    require!(need::guest());
    let lab = Lab::new(&LabConfig { containers: 1, ..LabConfig::default() }).unwrap();
    let image = Image::prepare().unwrap();
    assert!(image.packages().unwrap().contains("perftest"));
    let share = tempfile::TempDir::new().unwrap();
    let share = share.path();
    let programs = Path::new(env!("CARGO_BIN_EXE_rocinante-interop")).parent().unwrap();
    let config = GuestConfig { share: Some(share.to_owned()), ..GuestConfig::new(programs) };
    let mut guest = Guest::boot(&lab, &image, &config).unwrap();
    eprintln!("Linux {}, {:?}", guest.kernel(), guest.accelerator());

    commands(&guest);
    devices(&lab, &guest);
    fs::write(share.join("from-host"), "hello").unwrap();
    assert_eq!(
        guest.read("cat /share/from-host; echo back > /share/from-guest", SOON).unwrap(),
        "hello"
    );
    assert_eq!(fs::read_to_string(share.join("from-guest")).unwrap(), "back\n");

    // A command's caller does not wait for ever when the guest dies, and the machine goes with its
    // handle.
    let job = guest.start("reboot -f; sleep 60", Duration::from_secs(120)).unwrap();
    assert!(job.wait().unwrap_err().to_string().contains("reboot -f"));
    let deadline = Instant::now() + SOON;
    while guest.is_alive() {
        assert!(Instant::now() < deadline, "it still runs");
        std::thread::sleep(Duration::from_millis(10));
    }
    let process = format!("/proc/{}", guest.id());
    guest.stop();
    assert!(!Path::new(&process).exists());
}

fn commands(guest: &Guest) {
    let outcome = guest.run("echo out; echo err >&2; exit 7", SOON).unwrap();
    let parts = (outcome.code, outcome.stdout.as_str(), outcome.stderr.as_str());
    assert_eq!(parts, (7, "out\n", "err\n"));
    assert_eq!(guest.run("sleep 60", Duration::from_millis(200)).unwrap().code, control::TIMED_OUT);
    let job = guest.start("sleep 60", Duration::from_secs(120)).unwrap();
    assert_eq!(job.try_wait(), None);
    assert_eq!(job.kill().unwrap().code, 128 + 9);
    let error = guest.read("echo why >&2; exit 3", SOON).unwrap_err().to_string();
    assert!(error.contains("why") && error.contains('3'), "{error}");
}

/// Both RDMA devices are up with a path MTU of 4096, and both of the guest's addresses answer.
fn devices(lab: &Lab, guest: &Guest) {
    for link in [Link::Veth, Link::Tap] {
        let device = guest.network().device(link);
        let info = guest.read(&format!("ibv_devinfo -d {device}"), SOON).unwrap();
        assert!(info.contains("PORT_ACTIVE") && info.contains("active_mtu:\t\t4096"), "{info}");
        let container = guest.network().container(lab, link);
        let ours = [container.ipv4().into(), container.ipv6().unwrap().into()];
        for address in ours.map(|address: std::net::IpAddr| address.to_string()) {
            guest.read(&format!("ping -c 1 -W 5 {address}"), SOON).unwrap();
        }
    }
}
