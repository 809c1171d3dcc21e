//! RDMA over WireGuard, by a program in user space: the tests of the API, the packets that the host
//! sees, and the errors of the raw backends.

use rocinante::Access;
use rocinante::OpenOptions;
use rocinante::device::Backend;
use rocinante::verbs::{Mtu, SendOp};
use rocinante_lab::{Lab, LabConfig, Match};
use rocinante_tests::harness::{Family, Harness, On, Setup, pattern, wr};
use rocinante_tests::verbs::TESTS;
use rocinante_tests::{require, tunnel};

/// The modules of the API's tests. Left out: `mcast`, because WireGuard forwards to one peer each
/// address; `death`, whose processes have a lab without a tunnel.
const LEFT_OUT: [&str; 2] = ["mcast", "death"];

macro_rules! modules {
    ($($module:ident),+ $(,)?) => {
        $(
            #[test]
            fn $module() {
                require!(tunnel::available());
                run(stringify!($module));
            }
        )+

        const MODULES: &[&str] = &[$(stringify!($module)),+];
    };
}

modules!(
    operations, errors, misuse, memory, many, progress, objects, srq, unreliable, windows,
    register, flush, cm, services,
);

fn module_of(name: &str) -> &str {
    name.split_once("::").expect("module::test").0
}

fn run(module: &str) {
    let tests: Vec<_> = TESTS.iter().filter(|test| module_of(test.name) == module).collect();
    assert!(!tests.is_empty());
    for test in tests {
        test.run(On::Encrypted).unwrap_or_else(|why| panic!("{}: {why}", test.name));
    }
}

#[test]
fn no_module_is_missing() {
    for test in TESTS {
        let module = module_of(test.name);
        assert_ne!(MODULES.contains(&module), LEFT_OUT.contains(&module), "{module}");
    }
}

/// The path MTU fits the device, the data arrives, and nothing of RoCEv2 passes the host in plain.
#[test]
fn the_path_mtu_fits_and_the_host_sees_no_plain_packet() {
    require!(tunnel::available());
    for (asked, fits) in [(Some(Mtu::Mtu1024), Mtu::Mtu1024), (None, Mtu::Mtu4096)] {
        let mut setup = Setup::new(On::Encrypted);
        setup.connect.mtu = asked;
        let harness = Harness::new(&setup);
        let [plain, encrypted] = [Match::roce(), Match::udp(tunnel::PORT)]
            .map(|what| harness.lab().count(&what).unwrap());
        let [a, b] = &harness.sides;
        assert_eq!(a.ctx.query_device().active_mtu, fits);
        let [qp, _peer] = harness.pair();
        let bytes = pattern(1 << 20, 5);
        let source = a.pd.allocate(bytes.len(), Access::NONE).unwrap();
        let target = b.pd.allocate(bytes.len(), Access::ALL).unwrap();
        source.write(0, &bytes);
        let write = SendOp::Write { remote: target.address(), rkey: target.rkey(), imm: None };
        qp.post_send(&[wr(1, write, &[source.sge(0, bytes.len())])]).unwrap();
        a.succeed(1);
        assert!(target.to_vec(0, bytes.len()) == bytes);
        assert_eq!(plain.counter().unwrap().packets, 0);
        let carried = encrypted.counter().unwrap().bytes;
        assert!(carried > bytes.len() as u64, "{carried} bytes");
    }
}

#[test]
fn raw_backends_refuse_the_device_and_auto_takes_udp() {
    require!(tunnel::available());
    let lab = Lab::new(&LabConfig::default()).unwrap();
    let _tunnel = tunnel::join(&lab, 9000);
    let [one, other] = [0, 1].map(|at| lab.container(at));
    let open =
        |options: OpenOptions| one.run(|| options.open(tunnel::address(0, Family::V4))).unwrap();
    for (backend, words) in [(Backend::Packet, "Ethernet"), (Backend::Xdp, "native XDP")] {
        let error = open(OpenOptions::new().netdev(backend)).expect_err("refused").to_string();
        assert!(error.contains(words), "{error}");
    }
    let [v4, v6] = [Family::V4, Family::V6].map(|family| tunnel::address(1, family));
    for address in [v4, v6] {
        let ctx = other.run(|| OpenOptions::new().netdev_auto().open(address)).unwrap();
        assert_eq!(ctx.map(|ctx| ctx.backend()).unwrap(), Some(Backend::Udp));
    }
}
