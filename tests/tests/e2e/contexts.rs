//! A process opens a device as often as it likes. Each context has its own objects and its own
//! asynchronous events.

use std::net::IpAddr;
use std::os::fd::BorrowedFd;
use std::process::Command;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::task::{self, Poll, Wake, Waker};
use std::time::Duration;

use rocinante::device::Limits;
use rocinante::verbs::{AsyncEvent, PeerPath, QpEvent, QpState, SendOp};
use rocinante::{Access, Context, Cq, OpenOptions, Pd, PreparedContext, VerbsError, WcStatus};
use rocinante_lab::{Lab, LabConfig};
use rocinante_tests::harness::{Backend, Harness, Setup, Side, next, wait_until, wr};
use rocinante_tests::oracles::Oracle;
use rocinante_tests::{need, on_each_backend, require};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

on_each_backend!(
    all_contexts_learn_that_the_interface_is_gone,
    contexts_have_their_own_objects_and_events,
    a_device_closes_with_its_last_context,
    threads_open_and_close_one_device_at_the_same_time,
    options_of_a_device_that_is_open_must_suit,
);

/// Opens the device of a side once more.
fn again(side: &Side, options: OpenOptions) -> Result<Context, VerbsError> {
    side.run(|| options.open(side.address))
}

/// The objects of another context of a side's device.
struct Other {
    cq: Cq,
    pd: Pd,
    ctx: Context,
}

impl Other {
    fn open(side: &Side, backend: Backend) -> Self {
        let ctx = again(side, OpenOptions::new().netdev(backend)).unwrap();
        let (pd, cq) = (ctx.alloc_pd(), ctx.create_cq(64).unwrap());
        Self { cq, pd, ctx }
    }
}

fn contexts_have_their_own_objects_and_events(backend: Backend) {
    let harness = Harness::new(&Setup::new(backend));
    let [a, b] = &harness.sides;
    let other = Other::open(a, backend);
    assert_eq!(other.ctx.gids(), a.ctx.gids());

    // Objects of different contexts do not mix.
    let mixed = a.pd.qp(&other.cq, &a.cq).access(Access::ALL).build().unwrap_err();
    assert!(matches!(mixed, VerbsError::Invalid(_)), "{mixed}");
    let channel = other.ctx.create_comp_channel().unwrap();
    let mixed = a.ctx.create_cq_with(1, &channel).unwrap_err();
    assert!(matches!(mixed, VerbsError::Invalid(_)), "{mixed}");

    // Both work at the same time.
    let small = other.ctx.create_cq(4).unwrap();
    let [qp, _peer] = harness.pair();
    let second = other.pd.qp(&small, &small).access(Access::ALL).max_send_wr(512).build().unwrap();
    let [second, _second_peer] = harness.connect([second, b.qp().build().unwrap()]);
    let target = b.pd.allocate(64, Access::ALL).unwrap();
    let source = other.pd.allocate(64, Access::NONE).unwrap();
    let write = SendOp::Write { remote: target.address(), rkey: target.rkey(), imm: None };
    qp.post_send(&[wr(1, write, &[])]).unwrap();
    a.succeed(1);
    second.post_send(&[wr(2, write, &[source.sge(0, 64)])]).unwrap();
    let wc = next(&small);
    assert_eq!((wc.wr_id, wc.status), (2, WcStatus::Success));

    // The second overflows its queue. The first context hears nothing of that.
    let list: Vec<_> = (0..2 * small.depth() as u64).map(|wr_id| wr(wr_id, write, &[])).collect();
    second.post_send(&list).unwrap();
    wait_until("the queue pair breaks", || second.state() == QpState::Err);
    let mut events = Vec::new();
    wait_until("its events", || {
        events.extend(other.ctx.poll_async_event());
        events.len() == 2
    });
    assert!(events.contains(&AsyncEvent::CqOverflow { cq: small.number() }), "{events:?}");
    let fatal = AsyncEvent::Qp { qpn: second.qpn(), event: QpEvent::Fatal };
    assert!(events.contains(&fatal), "{events:?}");
    assert_eq!(a.ctx.poll_async_event(), None);

    // A region of the other context's domain is none of the first one's.
    qp.post_send(&[wr(3, write, &[source.sge(0, 64)])]).unwrap();
    a.complete(3, WcStatus::LocProtErr);
    let error = AsyncEvent::Qp { qpn: qp.qpn(), event: QpEvent::Fatal };
    assert!(a.ctx.poll_async_event().is_none_or(|event| event == error));
    assert_eq!(other.ctx.poll_async_event(), None);
}

/// A container with one device, and the backend with which it is opened there.
struct Alone {
    lab: Lab,
    backend: Backend,
}

impl Alone {
    fn new(backend: Backend) -> Self {
        Self { lab: Lab::new(&LabConfig::default()).unwrap(), backend }
    }

    fn open(&self, options: OpenOptions) -> Result<Context, VerbsError> {
        let container = self.lab.container(0);
        let options = options.netdev(self.backend);
        container.netns().run(|| options.open(container.ipv4().into())).unwrap()
    }
}

fn a_device_closes_with_its_last_context(backend: Backend) {
    let alone = Alone::new(backend);
    let limits = Limits::default().max_qp(7);
    let other = || alone.open(OpenOptions::new().limits(limits));
    let first = alone.open(OpenOptions::new()).unwrap();
    let second = alone.open(OpenOptions::new()).unwrap();
    drop(first);
    let cq = second.create_cq(1).unwrap();
    drop(second);
    // An object keeps its context.
    assert!(other().is_err());
    drop(cq);
    assert_eq!(other().unwrap().query_device().limits.max_qp, 7);
}

/// Again and again the last context closes while another thread opens the next.
fn threads_open_and_close_one_device_at_the_same_time(backend: Backend) {
    let alone = Alone::new(backend);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..10 {
                    drop(alone.open(OpenOptions::new()).expect("one port, many contexts"));
                }
            });
        }
    });
}

fn options_of_a_device_that_is_open_must_suit(backend: Backend) {
    let harness = Harness::new(&Setup::new(backend));
    let [a, _b] = &harness.sides;
    let plain = || OpenOptions::new().netdev(backend);
    let limits = Limits::default().max_qp(7);
    let other = match backend {
        Backend::Udp => Backend::Packet,
        _ => Backend::Udp,
    };
    for (options, named) in [
        (plain().netdev(other), "`netdev`"),
        (plain().shards(2), "`shards`"),
        (plain().limits(limits), "`limits`"),
        (plain().window_max(9), "`window_max`"),
        (plain().advertise_credits(true), "`advertise_credits`"),
        (plain().cut_writes(false), "`cut_writes`"),
        (plain().background(false), "`background`"),
        (plain().cm_retries(3), "`cm_retries`"),
        (plain().cpus([0]), "`cpus`"),
    ] {
        let error = again(a, options).unwrap_err().to_string();
        assert!(error.contains(named) && error.contains("eth0 is open"), "{named}: {error}");
    }
    // Of the addresses of an interface, some are open.
    let error = a.run(|| plain().open_interface("eth0")).unwrap_err().to_string();
    assert!(error.contains("with other addresses"), "{error}");
    // Options that are left out suit, and so do the same ones.
    for options in [OpenOptions::new(), plain(), plain().window_max(512), plain().shards(1)] {
        assert_eq!(again(a, options).unwrap().backend(), a.ctx.backend());
    }
}

struct Task(Sender<()>);

impl Wake for Task {
    fn wake(self: Arc<Self>) {
        let _ = self.0.send(());
    }
}

/// The events and the GID table of a context's port, open or not.
trait Port {
    fn event(&self) -> Option<AsyncEvent>;
    fn table(&self) -> Vec<Option<IpAddr>>;
    fn fd(&self) -> BorrowedFd<'_>;
}

macro_rules! port {
    ($type:ty) => {
        impl Port for $type {
            fn event(&self) -> Option<AsyncEvent> {
                self.poll_async_event()
            }

            fn table(&self) -> Vec<Option<IpAddr>> {
                self.gid_table()
            }

            fn fd(&self) -> BorrowedFd<'_> {
                self.async_fd()
            }
        }
    };
}

port!(PreparedContext);
port!(Context);

fn is_readable(port: &dyn Port) -> bool {
    let fd = port.fd();
    let mut fds = [PollFd::new(&fd, PollFlags::IN)];
    poll(&mut fds, Some(&Timespec::default())).unwrap() == 1
}

/// Each context gets the events of the port, whether it has opened something or not, and nothing
/// runs for that. The indices of the table stay.
#[test]
fn each_context_is_told_of_its_port_and_its_gids_keep_their_indices() {
    use AsyncEvent::{DeviceFatal, GidChange, PortActive, PortErr};
    require!(need::lab());
    let lab = Lab::new(&LabConfig::default()).unwrap();
    let container = lab.container(0);
    let within = |work: &(dyn Fn() -> Result<Context, VerbsError> + Sync)| {
        container.netns().run(work).unwrap().unwrap()
    };
    let ip = |words: &str| {
        let output = container.output(Command::new("ip").args(words.split(' '))).unwrap();
        assert!(output.status.success(), "ip {words}: {output:?}");
    };
    let udp = || OpenOptions::new().netdev(Backend::Udp);
    let prepare = || container.netns().run(|| udp().prepare_interface("eth0")).unwrap().unwrap();
    let own = IpAddr::from(container.ipv4());
    let address = |net: u8| IpAddr::from([10, 99, net, 1]);
    let peer = IpAddr::from(lab.container(1).ipv4());
    // IPv6 addresses come and go with the link.
    ip("addr flush dev eth0 scope link");
    ip("link set eth0 addrgenmode none");
    ip("-6 addr flush dev eth0");
    ip("address add 10.99.1.1/24 dev eth0");
    ip("address add 10.99.2.1/24 dev eth0");
    let (prepared, whole) = (prepare(), within(&|| udp().open_interface("eth0")));
    let some = container.netns().run(|| udp().prepare(address(1))).unwrap().unwrap();
    let all: [&dyn Port; 3] = [&prepared, &whole, &some];
    let first = [Some(own), Some(address(1)), Some(address(2))];
    assert_eq!((prepared.table(), whole.table()), (first.to_vec(), first.to_vec()));
    let told = |port: &dyn Port| {
        let events: Vec<AsyncEvent> = std::iter::from_fn(|| port.event()).collect();
        assert!(!is_readable(port));
        events
    };
    assert_eq!(all.map(told), [vec![], vec![], vec![]]);
    let change = |words: &str, expected: [&[AsyncEvent]; 3]| {
        ip(words);
        for (port, expected) in all.into_iter().zip(expected) {
            wait_until("the kernel says so", || is_readable(port) || expected.is_empty());
            assert_eq!(told(port), expected, "after `ip {words}`");
        }
    };
    change("link set eth0 down", [&[PortErr]; 3]);
    change("link set eth0 up", [&[PortActive]; 3]);
    change("address del 10.99.1.1/24 dev eth0", [&[GidChange]; 3]);
    let hole = vec![Some(own), None, Some(address(2))];
    assert_eq!((prepared.table(), whole.table(), some.table()), (hole.clone(), hole, vec![None]));
    change("address add 10.99.3.1/24 dev eth0", [&[GidChange], &[GidChange], &[]]);
    change("address add 10.99.1.1/24 dev eth0", [&[GidChange]; 3]);
    let moved = vec![Some(own), Some(address(3)), Some(address(2)), Some(address(1))];
    assert_eq!(whole.table(), moved);
    assert_eq!((prepared.table(), some.table()), (moved, vec![Some(address(1))]));

    // An address that the open device did not have: it says so, and the others work.
    let pd = whole.alloc_pd();
    let to = |index| pd.create_ah(&PeerPath::new(peer).sgid_index(index)).map(drop);
    let error = to(1).unwrap_err().to_string();
    assert!(error.contains("has 10.99.3.1 since it was opened"), "{error}");
    to(2).unwrap();
    to(3).unwrap();
    ip("address del 10.99.2.1/24 dev eth0");
    assert!(to(2).unwrap_err().to_string().contains("index 2 is a hole"));
    assert!(to(4).unwrap_err().to_string().contains("no GID index 4"));
    assert!(all.map(told).iter().take(2).all(|events| events == &[GidChange]));
    // A further context of the interface with all its addresses joins the open device.
    let joined = within(&|| udp().open_interface("eth0"));
    assert_eq!(joined.gids(), whole.gids());
    assert_eq!(joined.gid_table(), [Some(own), Some(address(3)), Some(address(1))]);

    // A task that waits is woken, and so is one that waits again.
    let (sender, woken) = channel();
    let waker = Waker::from(Arc::new(Task(sender)));
    let poll = || joined.poll_event(&mut task::Context::from_waker(&waker));
    for (words, expected) in [("down", PortErr), ("up", PortActive)] {
        assert!(poll().is_pending());
        ip(&format!("link set eth0 {words}"));
        woken.recv_timeout(Duration::from_secs(30)).unwrap();
        let Poll::Ready(event) = poll() else { panic!("woken for nothing") };
        assert_eq!(event.unwrap(), expected);
    }
    drop(joined);
    // A change that was undone before they looked causes no event.
    assert_eq!(all.map(|port| port.event()), [None; 3]);

    // The prepared device opens the present interface.
    drop((pd, whole));
    let ctx = container.netns().run(|| prepared.open()).unwrap().unwrap();
    assert_eq!(told(&ctx), []);
    assert_eq!(ctx.gid_table(), [Some(own), Some(address(3)), None, Some(address(1))]);
    ctx.alloc_pd().create_ah(&PeerPath::new(peer).sgid_index(1)).unwrap();

    // The interface goes: `DeviceFatal` comes once.
    ip("link delete eth0");
    for port in [&ctx as &dyn Port, &some] {
        let mut events = Vec::new();
        wait_until("the loss of the interface", || {
            events.extend(port.event());
            events.last() == Some(&DeviceFatal)
        });
        events.extend(told(port));
        assert_eq!(events.iter().filter(|event| **event == DeviceFatal).count(), 1, "{events:?}");
        assert!(port.table().iter().all(Option::is_none));
    }
}

fn all_contexts_learn_that_the_interface_is_gone(backend: Backend) {
    let why = "the interface is gone";
    let harness = Harness::new(&Setup::new(backend).may_break(Oracle::Retransmissions, why));
    let [a, _b] = &harness.sides;
    let other = Other::open(a, backend);
    // Nothing is posted that completes here.
    let idle = other.ctx.create_cq(4).unwrap();
    harness.lab().container(0).output(Command::new("ip").args(["link", "delete", "eth0"])).unwrap();
    for ctx in [&a.ctx, &other.ctx] {
        let mut events = Vec::new();
        // It may be seen down before it is gone.
        wait_until("the loss of the interface", || {
            events.extend(ctx.poll_async_event());
            events.last() == Some(&AsyncEvent::DeviceFatal)
        });
    }
    assert!(matches!(idle.wait(Some(Duration::from_secs(30))), Err(VerbsError::Io(_))));
}
