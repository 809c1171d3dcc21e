//! The virtual machine itself: it boots, runs what it is told, and leaves nothing behind.

use std::path::Path;
use std::time::Duration;

use rocinante_cli::lab::{Lab, LabConfig};
use rocinante_interop::guest::{Guest, GuestConfig, Image, control};

const SOON: Duration = Duration::from_secs(20);

#[test]
fn it_boots_and_runs_what_it_is_told() {
    let lab = Lab::new(&LabConfig { containers: 1, ..LabConfig::default() }).unwrap();
    let image = Image::prepare().unwrap();
    let programs = Path::new(env!("CARGO_BIN_EXE_rocinante-guest")).parent().unwrap();
    let start = std::time::Instant::now();
    let guest = Guest::boot(&lab, &image, &GuestConfig::new(programs)).unwrap();
    eprintln!("up in {:?}: {} {:?}", start.elapsed(), guest.kernel(), guest.accelerator());
    eprintln!("{}", guest.read("ibv_devinfo | head -40; ip address; rdma link; lsmod; df; date; free", SOON).unwrap());

    let outcome = guest.run("echo out; echo err >&2; exit 7", SOON).unwrap();
    assert_eq!((outcome.code, outcome.stdout.as_str(), outcome.stderr.as_str()), (7, "out\n", "err\n"));
    assert_eq!(guest.run("sleep 60", Duration::from_millis(200)).unwrap().code, control::TIMED_OUT);

    let job = guest.start("sleep 60", Duration::from_secs(60)).unwrap();
    assert_eq!(job.try_wait(), None);
    assert_eq!(job.kill().unwrap().code, 128 + 9);
}
