//! Two devices on a simulated network, in real time.
#![allow(dead_code, reason = "each program uses a part")]

use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rocinante::device::Limits;
use rocinante::verbs::{Key, SendData, SendOp};
use rocinante::{
    Access, ConnectOptions, Context, Cq, Mr, OpenOptions, Pd, PreparedQp, Qp, SendWr, WcStatus,
};
use rocinante_netdev::AnyPort;
use rocinante_netdev::sim::{SimConfig, SimNet, SimPort};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

pub(crate) const PATIENCE: Duration = Duration::from_secs(if cfg!(miri) { 300 } else { 30 });

pub(crate) const ADDRESSES: [IpAddr; 2] = [ip(1), ip(2)];

const fn ip(last: u8) -> IpAddr {
    IpAddr::V4(Ipv4Addr::new(10, 0, 0, last))
}

/// A device with a region and a completion queue.
pub(crate) struct Side {
    pub(crate) ctx: Context,
    pub(crate) pd: Pd,
    pub(crate) cq: Cq,
    pub(crate) mr: Mr,
}

impl Side {
    fn open(net: &SimNet, address: IpAddr, background: bool) -> Self {
        let port = net.port(&[address], &SimConfig::default()).unwrap();
        Self::over(port, "sim", background)
    }

    /// A device of this name over a port.
    pub(crate) fn over(port: SimPort, name: &str, background: bool) -> Self {
        Self::with(OpenOptions::new().background(background), port, name)
    }

    /// The same with these options.
    pub(crate) fn with(options: OpenOptions, port: SimPort, name: &str) -> Self {
        // Small tables: miri fills them slowly.
        let limits = Limits::default().max_qp(64).max_mr(64).max_mw(64);
        let options = options.limits(limits);
        let ctx = options.open_port(name, AnyPort::from(port), "a test wants it").unwrap();
        let cq = ctx.create_cq(1024).unwrap();
        let pd = ctx.alloc_pd();
        let mr = pd.allocate(4096, Access::ALL).unwrap();
        Self { ctx, pd, cq, mr }
    }

    pub(crate) fn qp(&self) -> PreparedQp {
        self.pd.qp(&self.cq, &self.cq).access(Access::ALL).build().unwrap()
    }

    pub(crate) fn succeed(&self, wr_id: u64) {
        let wc = self.cq.wait_one(PATIENCE).unwrap();
        assert_eq!((wc.wr_id, wc.status), (wr_id, WcStatus::Success));
    }
}

/// Two devices, each with or without its background thread.
pub(crate) fn sides(net: &SimNet, background: [bool; 2]) -> [Side; 2] {
    [0, 1].map(|at| Side::open(net, ADDRESSES[at], background[at]))
}

/// Connects two queue pairs; `timeout` is the exponent of both.
pub(crate) fn connect(sides: &[Side; 2], timeout: u8) -> [Qp; 2] {
    let [qp, peer] = sides.each_ref().map(|side| {
        side.pd
            .qp(&side.cq, &side.cq)
            .access(Access::ALL)
            .max_send_wr(512)
            .max_inline_data(64)
            .build()
            .unwrap()
    });
    let ends = [qp.endpoint(), peer.endpoint()];
    let options = ConnectOptions::default().timeout(timeout).retry_cnt(7);
    let peer = peer.connect(&ends[0], &options).unwrap();
    [qp.connect(&ends[1], &options).unwrap(), peer]
}

/// A signaled request.
pub(crate) fn request(wr_id: u64, op: SendOp, data: SendData<'_>) -> SendWr<'_> {
    SendWr::new(op, data).wr_id(wr_id)
}

/// A SEND request.
pub(crate) fn send(wr_id: u64, bytes: &[u8]) -> SendWr<'_> {
    request(wr_id, SendOp::Send { imm: None }, SendData::Inline(bytes))
}

/// Waits until the condition holds.
pub(crate) fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !is_so() {
        assert!(begin.elapsed() < PATIENCE, "never: {what}");
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// Two devices that only the test drives.
pub(crate) fn undriven() -> [Side; 2] {
    sides(&SimNet::new(), [false, false])
}

/// A WRITE of eight bytes to an address with its key.
pub(crate) fn write(wr_id: u64, to: (u64, Key)) -> SendWr<'static> {
    let op = SendOp::Write { remote: to.0, rkey: to.1, imm: None };
    request(wr_id, op, SendData::Inline(&[7; 8]))
}

/// Executes the request and returns its status.
pub(crate) fn done(sides: &[Side; 2], qp: &Qp, wr: SendWr<'_>) -> WcStatus {
    qp.post_send(&[wr]).unwrap();
    let mut wc = None;
    until("the request completes", || {
        sides[1].ctx.progress();
        wc = sides[0].cq.poll_one().unwrap();
        wc.is_some()
    });
    wc.unwrap().status
}

/// Whether a descriptor is readable now.
pub(crate) fn is_ready(fd: &impl AsFd) -> bool {
    poll(&mut [PollFd::new(fd, PollFlags::IN)], Some(&Timespec::default())).unwrap() > 0
}
