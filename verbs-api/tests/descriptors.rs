//! No descriptors left: a call that needs one fails, leaves nothing behind, and works once there
//! are descriptors again.
//!
//! One test, because the limit belongs to the process.

mod sim;

use std::fs::File;

use rocinante::cm::{self, Connecting, DatagramListener, Listener, Params};
use rocinante::device::Backend;
use rocinante::verbs::QpType;
use rocinante::{OpenOptions, VerbsError};
use rocinante_netdev::sim::SimNet;
use sim::{ADDRESSES, Side, sides};

const EMFILE: i32 = 24;

/// All descriptors that the process may have.
fn take_all() -> Vec<File> {
    std::iter::from_fn(|| File::open("/dev/null").ok()).collect()
}

fn is_lack<T>(result: Result<T, VerbsError>) -> bool {
    match result {
        Err(VerbsError::Io(error)) => error.raw_os_error() == Some(EMFILE),
        _ => false,
    }
}

#[test]
fn whoever_finds_no_descriptor_leaves_nothing_and_tries_again() {
    use rustix::process::{Resource, Rlimit, setrlimit};
    setrlimit(Resource::Nofile, Rlimit { current: Some(256), maximum: Some(256) }).unwrap();
    let net = SimNet::new();
    let sides = sides(&net, [false, false]);
    let [a, b]: &[Side; 2] = &sides;
    let at = (ADDRESSES[1], 7471).into();
    let held = || [a, b].map(|side| side.ctx.resources().unwrap());
    let before = held();
    for _ in 0..3 {
        let all = take_all();
        for _ in 0..20 {
            assert!(is_lack(a.ctx.create_comp_channel()));
            // The port is free again each time.
            assert!(is_lack(Listener::bind(&b.ctx, at, 1)));
            assert!(is_lack(DatagramListener::bind(&b.ctx, at, 1)));
        }
        // Objects that make their descriptor on request work without one.
        let resolving = cm::Resolving::start(&a.ctx, 0, at, &[]).unwrap();
        assert!(is_lack(resolving.fd()) && is_lack(resolving.notifier()));
        drop(all);
        resolving.fd().unwrap();
        drop(resolving);
        b.ctx.progress();
        a.ctx.progress();
        assert_eq!(held(), before);
        let listener = Listener::bind(&b.ctx, at, 1).unwrap();
        drop(DatagramListener::bind(&b.ctx, at, 1).unwrap());
        drop(a.ctx.create_comp_channel().unwrap());
        let qp = a.qp();
        let asked = Connecting::start(qp, at, &Params::default()).unwrap();
        b.ctx.progress();
        let all = take_all();
        assert!(is_lack(asked.fd()));
        // A listener has its descriptor from the beginning.
        let request = listener.try_request().unwrap().expect("it has come");
        assert!(matches!(
            listener.request(Some(std::time::Duration::ZERO)),
            Err(VerbsError::TimedOut)
        ));
        drop(all);
        asked.fd().unwrap();
        drop(request);
        a.ctx.progress();
        let error = asked.wait(sim::PATIENCE).unwrap_err();
        assert!(matches!(error, VerbsError::Cm(_)), "{error}");
    }
    // A group of a port of UDP is a socket, and the queue pair is in none without it.
    let ctx = OpenOptions::new().netdev(Backend::Udp).open(rocinante::doc::addresses().0).unwrap();
    let (pd, cq) = (ctx.alloc_pd(), ctx.create_cq(4).unwrap());
    let qp = pd.qp(&cq, &cq).qp_type(QpType::Ud).build().unwrap().ready().unwrap();
    let (group, without) = ([239, 1, 1, 1].into(), ctx.resources());
    for _ in 0..3 {
        let all = take_all();
        let refused = qp.attach_mcast(group);
        drop(all);
        let refused = refused.expect_err("a socket takes a descriptor");
        assert!(refused.to_string().contains("Too many open files"), "{refused}");
        assert_eq!(refused.errno(), EMFILE, "{refused}");
        assert_eq!(ctx.resources(), without);
        qp.attach_mcast(group).unwrap();
        assert_ne!(ctx.resources(), without);
        qp.detach_mcast(group).unwrap();
    }
    drop((qp, cq, pd, ctx));
    // A device needs descriptors, too, and gives back those that it got.
    let all = take_all();
    let count = || std::fs::read_dir("/proc/self/fd").map(Iterator::count);
    assert_eq!(count().unwrap_err().raw_os_error(), Some(EMFILE));
    drop(all);
    let before = count().unwrap();
    for spare in 0..6 {
        let mut all = take_all();
        all.truncate(all.len() - spare);
        let address = [10, 0, 1, 1].into();
        if let Ok(port) = net.port(&[address], &Default::default()) {
            let port = rocinante_netdev::AnyPort::from(port);
            let opened = rocinante::OpenOptions::new().open_port("poor", port, "a test wants it");
            assert!(opened.is_ok() || is_lack(opened.map(drop)), "{spare}");
        }
        drop(all);
        assert_eq!(count().unwrap(), before, "{spare} to spare");
    }
}
