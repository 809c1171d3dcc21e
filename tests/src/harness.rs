//! Two devices in two containers of a lab, and queue pairs between them; or both ends on one device
//! of the kernel: see [`On`].
//!
//! When a harness is dropped, it checks rules that hold for every test: see
//! [`oracles`](crate::oracles). A test that breaks one of these rules says which and why, by
//! [`Setup::breaks`] or [`Setup::may_break`].
//!
//! Both devices live in this process. Each is opened inside its container's namespace, and its
//! sockets stay there. Queue pairs are connected inside the namespace, too; otherwise they would
//! not send from a source port each. They are connected directly, without TCP.
//!
//! ```no_run
//! use rocinante::Access;
//! use rocinante::device::Backend;
//! use rocinante::verbs::SendOp;
//! use rocinante_tests::harness::{Harness, Setup, wr};
//!
//! fn a_write_arrives() {
//!     rocinante_tests::require!(rocinante_tests::need::backend(Backend::Udp));
//!     let harness = Harness::new(&Setup::new(Backend::Udp));
//!     let [a, b] = &harness.sides;
//!     let [qp, _peer] = harness.pair();
//!     let target = b.pd.allocate(64, Access::ALL).unwrap();
//!     let source = a.pd.allocate(64, Access::NONE).unwrap();
//!     let op = SendOp::Write { remote: target.address(), rkey: target.rkey(), imm: None };
//!     qp.post_send(&[wr(1, op, &[source.sge(0, 64)])]).unwrap();
//!     a.succeed(1);
//! }
//! # a_write_arrives();
//! ```

use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rocinante::cm::{Listener, Request};
pub use rocinante::device::Backend;
use rocinante::verbs::{Budget, SendData, SendOp, Sge};
use rocinante::{
    Access, CompChannel, ConnectOptions, Context, Cq, Endpoint, OpenOptions, Pd, PreparedQp, Qp,
    QpBuilder, SendWr, VerbsError, Wc, WcStatus,
};

use crate::oracles::{Channels, Oracles, becomes_idle, is_ready_within};
pub use crate::setup::{ADDRESS_VARIABLE, DEVICE_VARIABLE, Family, KernelDevice, On, Setup};
use crate::tunnel;
use rocinante_lab::{ChildGuard, Lab, Netns};

/// How long an expected event may take on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Entries of each side's completion queue.
pub const CQ_DEPTH: u32 = 4096;

/// The vendor id that Soft-RoCE reports (`RXE_VENDOR_ID` of Linux).
const RXE_VENDOR: u32 = 0xff_ffff;

/// A device in a container, with a protection domain and a completion queue.
#[derive(Debug)]
pub struct Side {
    /// The device.
    pub ctx: Context,
    /// A protection domain.
    pub pd: Pd,
    /// The completion queue of all its queue pairs.
    pub cq: Cq,
    /// Its address.
    pub address: IpAddr,
    /// `None` if the whole process is inside the namespace.
    netns: Option<Netns>,
    /// The channels that [`channel`](Self::channel) made.
    pub(crate) channels: Channels,
}

impl Side {
    /// A device that this process opened in its own namespace.
    #[must_use]
    pub fn of(ctx: Context, pd: Pd, cq: Cq, address: IpAddr) -> Self {
        Self { ctx, pd, cq, address, netns: None, channels: Channels::default() }
    }

    /// Opens the device with `address` in a namespace. Panics if it cannot be opened.
    #[must_use]
    pub fn open(netns: &Netns, address: IpAddr, setup: &Setup) -> Self {
        let backend = setup.backend();
        let options = setup.open_options(backend);
        let ctx = netns.run(|| options.open(address)).expect("a namespace");
        let ctx = ctx.unwrap_or_else(|e| panic!("{backend} on {address}: {e}"));
        let (pd, cq) = (ctx.alloc_pd(), ctx.create_cq(CQ_DEPTH).expect("a completion queue"));
        let netns = Some(netns.clone());
        Self { ctx, pd, cq, address, netns, channels: Channels::default() }
    }

    pub(crate) fn open_kernels(device: &KernelDevice, family: Family) -> Self {
        let address = device.address_of(family).unwrap_or_else(|why| panic!("{why}"));
        let ctx = OpenOptions::new().device(&device.name).open(address);
        let ctx = ctx.unwrap_or_else(|e| panic!("{} with {address}: {e}", device.name));
        let (pd, cq) = (ctx.alloc_pd(), ctx.create_cq(CQ_DEPTH).expect("a completion queue"));
        Self { ctx, pd, cq, address, netns: None, channels: Channels::default() }
    }

    /// Whether the device is the one in software.
    #[must_use]
    pub fn is_software(&self) -> bool {
        self.ctx.backend().is_some()
    }

    /// Runs `work` on a thread inside the container. Panics as `work` does.
    pub fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        match &self.netns {
            Some(netns) => netns.run(work).expect("a namespace"),
            None => work(),
        }
    }

    /// A completion channel. When the harness is dropped, it checks the channel's descriptor.
    /// Panics if it cannot be made.
    #[must_use]
    pub fn channel(&self) -> CompChannel {
        let channel = self.ctx.create_comp_channel().expect("a completion channel");
        self.channels.lock().expect("no thread panicked").push(channel.clone());
        channel
    }

    /// A queue pair on the side's completion queue, with queues of 512, 4 elements and 256 bytes
    /// inline.
    #[must_use]
    pub fn qp(&self) -> QpBuilder {
        let qp = self.pd.qp(&self.cq, &self.cq).access(Access::ALL);
        qp.max_send_wr(512).max_recv_wr(512).max_sge(4).max_inline_data(256)
    }

    /// A queue pair on the side's completion queue, with room for one request and one receive:
    /// for tests that make many, and use none. Panics if it cannot be made.
    #[must_use]
    pub fn small_qp(&self) -> PreparedQp {
        let qp = self.pd.qp(&self.cq, &self.cq).max_send_wr(1).max_recv_wr(1);
        qp.build().expect("a queue pair")
    }

    /// The next completion of the side's queue. Panics if there is none within [`PATIENCE`].
    #[track_caller]
    #[must_use]
    pub fn next(&self) -> Wc {
        next(&self.cq)
    }

    /// Takes the next completion, which must be the success of `wr_id`. Panics if it is not.
    #[track_caller]
    pub fn succeed(&self, wr_id: u64) -> Wc {
        self.complete(wr_id, WcStatus::Success)
    }

    /// Takes the next completion, which must be that of `wr_id` with this status. Panics if it is
    /// not.
    #[track_caller]
    pub fn complete(&self, wr_id: u64, status: WcStatus) -> Wc {
        let wc = self.next();
        let counters = || self.ctx.counters();
        assert_eq!((wc.wr_id, wc.status), (wr_id, status), "{wc:?}\n{:?}", counters());
        wc
    }

    /// Asserts that nothing completes within `pause`. Panics if something does.
    #[track_caller]
    pub fn quiet(&self, pause: Duration) {
        match self.cq.wait_one(pause) {
            Err(VerbsError::TimedOut) => {}
            other => panic!("nothing should complete, but: {other:?}"),
        }
    }
}

/// Two devices in the first two containers of a lab, or one device of the kernel, opened twice.
#[derive(Debug)]
pub struct Harness {
    /// The rules that the devices are checked against at the end: dropped first.
    oracles: Oracles,
    /// The devices.
    pub sides: [Side; 2],
    /// How they were made.
    pub setup: Setup,
    /// The programs that encrypt between the containers.
    _tunnel: Option<[ChildGuard; 2]>,
    /// The lab of software devices: dropped last.
    pub lab: Option<Lab>,
}

impl Harness {
    /// Opens the devices. Software devices get a new lab. Panics if that fails: ask
    /// [`need::backend`](crate::need::backend) first.
    #[must_use]
    pub fn new(setup: &Setup) -> Self {
        if let On::Kernel(device) = &setup.on {
            let sides = [0, 1].map(|_| Side::open_kernels(device, setup.family));
            return Self::of(sides, setup, None, None);
        }
        let lab = setup.lab();
        let encrypted = setup.on == On::Encrypted;
        let tunnel = encrypted.then(|| tunnel::join(&lab, setup.underlay()));
        let sides = [0, 1].map(|index| {
            if !setup.segmentation {
                lab.container(index).set_udp_segmentation(false).expect("ethtool");
            }
            let address = match setup.on {
                On::Encrypted => tunnel::address(index, setup.family),
                _ => address(&lab, index, setup.family),
            };
            Side::open(lab.container(index).netns(), address, setup)
        });
        Self::of(sides, setup, tunnel, Some(lab))
    }

    fn of(
        sides: [Side; 2],
        setup: &Setup,
        tunnel: Option<[ChildGuard; 2]>,
        lab: Option<Lab>,
    ) -> Self {
        let oracles = Oracles::new(&sides, &setup.exceptions);
        Self { oracles, sides, setup: setup.clone(), _tunnel: tunnel, lab }
    }

    /// Its parts, for another use. The rules are checked now, and not again later.
    #[must_use]
    pub fn take_apart(self) -> ([Side; 2], Setup, Option<Lab>) {
        (self.sides, self.setup, self.lab)
    }

    /// Waits until the background threads of the devices are idle. Panics if they never become
    /// idle: see [`becomes_idle`].
    #[track_caller]
    pub fn rests(&self) {
        let devices = self.sides.each_ref().map(|side| &side.ctx);
        becomes_idle(&devices)
            .unwrap_or_else(|why| panic!("{why}: {:#?}", devices.map(Context::counters)));
    }

    /// The lab of the software devices. Panics if the device is a device of the kernel.
    #[must_use]
    pub fn lab(&self) -> &Lab {
        self.lab.as_ref().expect("only devices in software are in a lab")
    }

    /// Whether the device is the software one: it counts all that it does, and reports more than
    /// verbs do.
    #[must_use]
    pub fn is_software(&self) -> bool {
        self.sides[0].is_software()
    }

    /// Whether the device is Linux Soft-RoCE. A test asks this where Soft-RoCE departs from verbs.
    #[must_use]
    pub fn is_rxe(&self) -> bool {
        let hardware = self.sides[0].ctx.query_device().hardware;
        hardware.is_some_and(|hardware| hardware.vendor_id == RXE_VENDOR)
    }

    /// Statuses of a SEND that is longer than its receive: at the sender, and at the receiver (IBTA
    /// volume 1, 9.7.5 \[M\]: "invalid request"). Soft-RoCE reports "remote operational error" to
    /// the sender, and completes the receive with `LOC_QP_OP_ERR`.
    #[must_use]
    pub fn too_long(&self) -> [WcStatus; 2] {
        if self.is_rxe() {
            [WcStatus::RemOpErr, WcStatus::LocQpOpErr]
        } else {
            [WcStatus::RemInvReqErr, WcStatus::LocLenErr]
        }
    }

    /// A connected pair of queue pairs as [`Side::qp`] makes them. Panics if they cannot be made or
    /// connected.
    #[must_use]
    pub fn pair(&self) -> [Qp; 2] {
        let [a, b] = [0, 1].map(|i| self.sides[i].qp().build().expect("a queue pair"));
        self.connect([a, b])
    }

    /// Connects two queue pairs, one of each side. Panics if they cannot be connected.
    #[must_use]
    pub fn connect(&self, qps: [PreparedQp; 2]) -> [Qp; 2] {
        self.connect_with(qps, [&self.setup.connect, &self.setup.connect])
    }

    /// Connects two queue pairs, one of each side, each with its own options. Panics if they cannot
    /// be connected.
    #[must_use]
    pub fn connect_with(&self, qps: [PreparedQp; 2], options: [&ConnectOptions; 2]) -> [Qp; 2] {
        let ends = [qps[0].endpoint(), qps[1].endpoint()];
        self.connect_to(qps, ends, options)
    }

    /// As [`connect`](Self::connect), of programs that swap numbers by hand: neither side knows the
    /// other's peer kind. Panics if they cannot be connected.
    #[must_use]
    pub fn connect_by_hand(&self, qps: [PreparedQp; 2]) -> [Qp; 2] {
        let ends = [0, 1].map(|at| qps[at].endpoint().budget(Budget::STANDARD).queue(None));
        self.connect_to(qps, ends, [&self.setup.connect; 2])
    }

    /// Connects two queue pairs, one of each side, with these attributes of each other. Panics if
    /// they cannot be connected.
    #[must_use]
    pub fn connect_to(
        &self,
        qps: [PreparedQp; 2],
        ends: [Endpoint; 2],
        options: [&ConnectOptions; 2],
    ) -> [Qp; 2] {
        let [a, b] = qps;
        // The passive side first, so that it is ready before the first packet arrives.
        let b = self.sides[1].run(|| b.connect(&ends[0], options[1]));
        let a = self.sides[0].run(|| a.connect(&ends[1], options[0]));
        self.oracles.count_queue_pairs();
        [a, b].map(|qp| qp.expect("connected"))
    }

    /// Runs `work` for both sides at the same time, each on a thread inside its container. Panics
    /// as `work` does.
    pub fn both<T: Send>(&self, work: impl Fn(usize, &Side) -> T + Sync) -> [T; 2] {
        std::thread::scope(|scope| {
            let work = &work;
            let [a, b] = [0, 1].map(|at| {
                let side = &self.sides[at];
                scope.spawn(move || side.run(|| work(at, side)))
            });
            [a, b].map(|thread| {
                thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            })
        })
    }
}

/// The address of a container. Panics if the lab has no such container, or no IPv6.
#[must_use]
pub fn address(lab: &Lab, index: usize, family: Family) -> IpAddr {
    let container = lab.container(index);
    match family {
        Family::V4 => container.ipv4().into(),
        Family::V6 => container.ipv6().expect("a lab with IPv6").into(),
    }
}

/// The next completion of a queue. Panics if there is none within [`PATIENCE`].
#[track_caller]
#[must_use]
pub fn next(cq: &Cq) -> Wc {
    match cq.wait_one(PATIENCE) {
        Ok(wc) => wc,
        Err(error) => panic!("no completion: {error}"),
    }
}

/// The next event of a channel. Its descriptor must become readable first. Panics if the descriptor
/// does not become readable within [`PATIENCE`], or there is no event.
#[track_caller]
#[must_use]
pub fn woken(channel: &CompChannel) -> Cq {
    let ready = is_ready_within(channel, PATIENCE);
    let event = channel.try_event();
    assert_eq!(ready, event.is_some(), "the descriptor is ready, and there is an event");
    event.expect("an event")
}

/// The next request at a listener. Its descriptor must become readable first. Panics if the
/// descriptor does not become readable within [`PATIENCE`], or there is no request.
#[track_caller]
#[must_use]
pub fn requested(listener: &Listener) -> Request {
    let ready = is_ready_within(listener, PATIENCE);
    let request = listener.try_request().expect("a listener");
    assert_eq!(ready, request.is_some(), "the descriptor is ready, and there is a request");
    request.expect("a request")
}

/// A signaled request.
#[must_use]
pub fn wr(wr_id: u64, op: SendOp, sges: &[Sge]) -> SendWr<'_> {
    let data = SendData::Sges(sges);
    SendWr::new(op, data).wr_id(wr_id)
}

/// `len` bytes that depend on `seed` and do not repeat soon.
#[must_use]
pub fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let mut bytes = vec![0; len];
    fastrand::Rng::with_seed(seed).fill(&mut bytes);
    bytes
}

/// Asserts that two byte strings are equal, and names the first difference if not. Panics if they
/// are not.
#[track_caller]
pub fn assert_same(found: &[u8], expected: &[u8], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}: length");
    if let Some(at) = found.iter().zip(expected).position(|(a, b)| a != b) {
        let wrong = found.iter().zip(expected).filter(|(a, b)| a != b).count();
        panic!(
            "{what}: {wrong} of {} bytes differ, the first at {at}: {:#04x} instead of {:#04x}",
            found.len(),
            found[at],
            expected[at]
        );
    }
}

/// Tells other threads to stop, also if this one panics.
#[derive(Debug)]
pub struct StopOnDrop<'a>(pub &'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Waits until `done` returns `true`. Panics if it does not within [`PATIENCE`].
#[track_caller]
pub fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !done() {
        assert!(Instant::now() < deadline, "not in time: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Makes one test per backend of each function that takes a [`Backend`] or [`On`].
/// `on_each_backend!(f, g)` makes the tests `f::udp`, `f::packet`, `f::afxdp`, `g::udp`, …;
/// `on_each_backend!(f + nft)` needs something else, too;
/// `on_each_backend!(windows::*)` takes all tests that [`verbs`](crate::verbs) lists for that
/// module.
#[macro_export]
macro_rules! on_each_backend {
    ($module:ident::*) => {
        $crate::$module!();
    };
    ($($name:ident $(+ $need:ident)*),+ $(,)?) => {
        $crate::on_each_backend!($(super::$name as $name $(+ $need)*),+);
    };
    ($($function:path as $name:ident $(+ $need:ident)*),+) => {$(
        mod $name {
            $crate::on_backends! {
                udp: Udp $(+ $need)* => $function($crate::harness::Backend::Udp.into());
                packet: Packet $(+ $need)* => $function($crate::harness::Backend::Packet.into());
                afxdp: Xdp $(+ $need)* => $function($crate::harness::Backend::Xdp.into());
            }
        }
    )+};
}

/// Makes a test of each row: its name, the backend that it needs, what else, and its work, as in
/// `a_packet_is_lost: Packet + nft => losses("packet");`.
#[macro_export]
macro_rules! on_backends {
    ($( $name:ident: $backend:ident $(+ $need:ident)* => $work:expr; )*) => {$(
        #[test]
        fn $name() {
            $crate::require!($crate::need::backend($crate::harness::Backend::$backend));
            $( $crate::require!($crate::need::$need()); )*
            $work;
        }
    )*};
}
