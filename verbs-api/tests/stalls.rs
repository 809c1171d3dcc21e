//! What a process that did not run for a while does next: it reads what waits for it before it believes that a peer is
//! silent. Two devices on a simulated network; the time is real.

use std::net::IpAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rocinante::{
    Access, ConnectOptions, Context, Cq, Mr, OpenOptions, Pd, Qp, SendData, SendOp, SendWr,
    WcStatus,
};
use rocinante_netdev::AnyPort;
use rocinante_netdev::sim::{SimConfig, SimNet, Verdict};

const PATIENCE: Duration = Duration::from_secs(30);

/// A device with a region and a completion queue.
struct Side {
    ctx: Context,
    pd: Pd,
    cq: Cq,
    mr: Mr,
}

impl Side {
    fn open(net: &SimNet, address: IpAddr, background: bool) -> Self {
        let port = net.port(&[address], &SimConfig::default()).unwrap();
        let options = OpenOptions::new().background(background);
        let ctx = options.open_port("sim", AnyPort::from(port), "a test wants it").unwrap();
        let cq = ctx.create_cq(1024).unwrap();
        let pd = ctx.alloc_pd();
        let mr = pd.allocate(4096, Access::ALL).unwrap();
        Self { ctx, pd, cq, mr }
    }

    fn timeouts(&self) -> u64 {
        self.ctx.counters().transport.local_ack_timeout_err
    }

    /// Answers what has come; a plain acknowledgement waits for the second call.
    fn serve(&self) {
        self.ctx.progress();
        self.ctx.progress();
    }

    fn succeed(&self, wr_id: u64) {
        let wc = self.cq.wait_one(PATIENCE).unwrap();
        assert_eq!((wc.wr_id, wc.status), (wr_id, WcStatus::Success));
    }
}

const ADDRESSES: [IpAddr; 2] = [ip(1), ip(2)];

const fn ip(last: u8) -> IpAddr {
    IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, last))
}

fn sides(net: &SimNet, background: [bool; 2]) -> [Side; 2] {
    [0, 1].map(|at| Side::open(net, ADDRESSES[at], background[at]))
}

/// Connects two queue pairs; `timeout` is the exponent of both.
fn connect(sides: &[Side; 2], timeout: u8) -> [Qp; 2] {
    let [qp, peer] = sides.each_ref().map(|side| {
        side.pd.qp(&side.cq, &side.cq).max_send_wr(512).max_inline_data(64).build().unwrap()
    });
    let ends = [qp.endpoint(), peer.endpoint()];
    let options = ConnectOptions { timeout, retry_cnt: 7, ..ConnectOptions::default() };
    let peer = peer.connect(&ends[0], &options).map_err(|(_, error)| error).unwrap();
    [qp.connect(&ends[1], &options).map_err(|(_, error)| error).unwrap(), peer]
}

/// A WRITE of eight bytes.
fn write(wr_id: u64, to: &Side, signaled: bool) -> SendWr<'static> {
    SendWr {
        wr_id,
        op: SendOp::Write { remote: to.mr.address(), rkey: to.mr.rkey(), imm: None },
        data: SendData::Inline(&[7; 8]),
        signaled,
        solicited: false,
        fence: false,
    }
}

/// The answer is the last of more than one burst takes, and the process reads them only long after the timeout.
#[test]
fn an_answer_that_waits_behind_many_packets_is_no_silence() {
    const BEFORE: usize = 400;
    const TIMEOUT_10: Duration = Duration::from_nanos(4096 << 10);
    let net = SimNet::new(1);
    let sides = sides(&net, [false, false]);
    let [a, b] = &sides;
    let [_its, busy] = connect(&sides, 20);
    let [qp, _peer] = connect(&sides, 10);
    qp.post_send(&[write(1, b, true)]).unwrap();
    busy.post_send(&vec![write(2, a, false); BEFORE]).unwrap();
    // Only now does b read the WRITE, and answer.
    b.serve();
    assert!(net.stats().delivered > 300, "more than a burst, if not all at once");
    std::thread::sleep(3 * TIMEOUT_10);
    a.succeed(1);
    let counters = a.ctx.counters().transport;
    assert_eq!((counters.local_ack_timeout_err, counters.retransmitted_pkts), (0, 0));
    assert_eq!(b.ctx.counters().transport.duplicate_request, 0);
}

/// The process stands still between writing a packet and sending it, for longer than the timeout: the peer has from then on
/// as long as it was promised.
#[test]
fn the_timeout_begins_when_the_packet_leaves() {
    const TIMEOUT_14: Duration = Duration::from_nanos(4096 << 14);
    let net = SimNet::new(1);
    let sides = sides(&net, [false, false]);
    let [a, b] = &sides;
    let [qp, _peer] = connect(&sides, 14);
    let left = Arc::new(Mutex::new(None));
    for round in 0..20 {
        let stamp = left.clone();
        net.set_tap(Some(Box::new(move |_| {
            std::thread::sleep(2 * TIMEOUT_14);
            *stamp.lock().unwrap() = Some(Instant::now());
            Verdict::Pass
        })));
        let before = a.timeouts();
        qp.post_send(&[write(round, b, true)]).unwrap();
        net.set_tap(None);
        a.ctx.progress();
        let waited = left.lock().unwrap().take().map(|left: Instant| left.elapsed()).unwrap();
        let after = a.timeouts();
        b.serve();
        a.succeed(round);
        // Unless the machine let this thread wait once more.
        if waited < TIMEOUT_14 {
            assert_eq!(before, after);
            return;
        }
    }
    panic!("this machine is too busy: a thread never ran for {TIMEOUT_14:?}");
}

/// The program polled a moment ago and does not any more. Whom a packet wakes then looks at it at once, and does not wait first
/// for the program: on a busy machine it may not run again for long.
#[test]
fn who_is_woken_by_a_packet_reads_it_before_it_stands_aside() {
    let net = SimNet::new(1);
    let sides = sides(&net, [false, true]);
    let [a, b] = &sides;
    let [qp, _peer] = connect(&sides, 20);
    let mut best = Duration::MAX;
    for round in 0..100 {
        // The thread falls asleep.
        std::thread::sleep(Duration::from_millis(2));
        assert_eq!(b.cq.poll_one().unwrap(), None);
        let start = Instant::now();
        qp.post_send(&[write(round, b, true)]).unwrap();
        a.succeed(round);
        best = best.min(start.elapsed());
    }
    assert!(best < Duration::from_micros(300), "{best:?} at best");
}
