//! What the objects of the API do on a device, tried inside the guest with both queue pairs in one process.

use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::unistd::{Gid, Uid, setgid, setuid};
use rocinante::{
    Access, AsyncEvent, CompChannel, ConnectOptions, Context, Cq, ModifyAttr, ModifyError, Mr, Mtu,
    OpenOptions, Pd, PeerPath, PostError, Provider, Qp, QpAttr, QpCaps, QpEvent, QpState, RecvWr,
    SendData, SendOp, SendWr, VerbsError, WcOpcode, WcStatus,
};

use crate::matrix::Step;

/// A named check.
pub struct Check {
    /// Its name.
    pub name: &'static str,
    run: fn(&Context) -> Step,
}

/// All of them.
pub static CHECKS: [Check; 13] = [
    Check { name: "device", run: device },
    Check { name: "query", run: query },
    Check { name: "in_use", run: in_use },
    Check { name: "changes_refused", run: changes_refused },
    Check { name: "requests_refused", run: requests_refused },
    Check { name: "lists", run: lists },
    Check { name: "unsignaled", run: unsignaled },
    Check { name: "channel", run: channel },
    Check { name: "drained_event", run: drained_event },
    Check { name: "overflow", run: overflow },
    Check { name: "regions", run: regions },
    Check { name: "counters", run: counters },
    Check { name: "threads", run: threads },
];

/// Runs the check of this name on a device.
///
/// # Errors
/// What was otherwise than it should be.
pub fn run(name: &str, device: &str, address: IpAddr) -> Step {
    let check = CHECKS.iter().find(|check| check.name == name);
    let check = check.ok_or_else(|| format!("there is no check {name:?}"))?;
    let ctx = OpenOptions::new().device(device).open(address).map_err(text)?;
    (check.run)(&ctx)
}

/// Runs all of them and prints what became of each.
///
/// # Errors
/// How many failed.
pub fn run_all(device: &str, address: IpAddr) -> Step {
    let mut failed = 0;
    for check in &CHECKS {
        match run(check.name, device, address) {
            Ok(()) => println!("{:<18}ok", check.name),
            Err(why) => {
                println!("{:<18}FAILED: {why}", check.name);
                failed += 1;
            }
        }
    }
    ensure(failed == 0, || format!("{failed} of {} checks failed", CHECKS.len()))
}

/// Opens a device as a user of this number, and registers so many bytes.
///
/// # Errors
/// What the device or the kernel says.
pub fn open(device: &str, address: IpAddr, bytes: usize, user: u32) -> Step {
    if user != 0 {
        setgid(Gid::from_raw(user)).map_err(|error| error.to_string())?;
        setuid(Uid::from_raw(user)).map_err(|error| error.to_string())?;
    }
    let ctx = OpenOptions::new().device(device).open(address).map_err(text)?;
    ctx.alloc_pd().allocate(bytes, Access::LOCAL_WRITE).map(drop).map_err(text)
}

const SOON: Duration = Duration::from_secs(10);
/// Long enough to be sure that nothing comes.
const A_WHILE: Duration = Duration::from_millis(100);
const CAPS: QpCaps = QpCaps {
    max_send_wr: 64,
    max_recv_wr: 64,
    max_send_sge: 2,
    max_recv_sge: 2,
    max_inline_data: 64,
};

/// Two queue pairs of one device, connected with each other, and a region for both.
struct Pair {
    a: Qp,
    b: Qp,
    sent: Cq,
    received: Cq,
    mr: Mr,
    pd: Pd,
}

impl Pair {
    fn new(ctx: &Context) -> Step<Self> {
        Self::with(ctx, ctx.create_cq(256).map_err(text)?, ctx.create_cq(256).map_err(text)?)
    }

    fn with(ctx: &Context, sent: Cq, received: Cq) -> Step<Self> {
        let pd = ctx.alloc_pd();
        let mr = pd.allocate(64 << 10, Access::ALL).map_err(text)?;
        let prepare = || pd.qp(&sent, &received).caps(CAPS).build().map_err(text);
        let (a, b) = (prepare()?, prepare()?);
        let (to_a, to_b) = (a.endpoint(), b.endpoint());
        let options = ConnectOptions::default();
        let a = a.connect(&to_b, &options).map_err(|(_, error)| text(error))?;
        let b = b.connect(&to_a, &options).map_err(|(_, error)| text(error))?;
        Ok(Self { a, b, sent, received, mr, pd })
    }

    /// WRITE of `len` bytes from the start of the region to its second half.
    fn write(&self) -> SendOp {
        let remote = self.mr.address() + (32 << 10);
        SendOp::Write { remote, rkey: self.mr.rkey(), imm: None }
    }
}

fn signaled<'a>(wr_id: u64, op: SendOp, data: SendData<'a>) -> SendWr<'a> {
    SendWr { wr_id, op, data, signaled: true, solicited: false, fence: false }
}

fn succeeds(cq: &Cq, wr_id: u64, opcode: WcOpcode) -> Step {
    let wc = cq.wait_one(SOON).map_err(text)?;
    let found = (wc.wr_id, wc.status, wc.opcode);
    ensure(found == (wr_id, WcStatus::Success, opcode), || format!("a completion: {wc:?}"))
}

fn device(ctx: &Context) -> Step {
    let name = ctx.name().to_owned();
    let address = ctx.gids()[0];
    ensure(ctx.provider() == Provider::Hardware && ctx.backend().is_none(), || "provider".into())?;
    ensure(ctx.gids().len() == 1, || format!("one address: {:?}", ctx.gids()))?;
    let attr = ctx.query_device();
    let hardware = attr.hardware.clone().ok_or("no attributes of hardware")?;
    let sane = attr.limits.max_qp > 0 && attr.active_mtu == Mtu::Mtu4096 && attr.port.is_none();
    ensure(sane && hardware.port == 1 && hardware.gid_indices.len() == 1, || format!("{attr:?}"))?;
    // By name with all addresses, by port, by address alone.
    let all = Context::open_device(&name).map_err(text)?;
    ensure(all.gids().len() >= 2 && all.gids()[0] == address, || format!("{:?}", all.gids()))?;
    let port = Context::open_device(&format!("{name}:1")).map_err(text)?;
    ensure(port.name() == name, || "the port's device".into())?;
    let any = OpenOptions::new().device("hw").open(address).map_err(text)?;
    ensure(any.name() == name && any.gids() == [address], || "whichever has it".into())?;
    let error = Context::open_device(&format!("{name}:9")).err().ok_or("there is a port 9")?;
    ensure(error.to_string().contains("port 1 is Ethernet, ACTIVE"), || error.to_string())?;
    let error = OpenOptions::new().device(&name).netdev(rocinante::Backend::Udp).open(address);
    let error = error.err().ok_or("a backend for hardware")?;
    ensure(matches!(error, VerbsError::Invalid(_)), || error.to_string())
}

fn query(ctx: &Context) -> Step {
    let cq = ctx.create_cq(8).map_err(text)?;
    let pd = ctx.alloc_pd();
    let qp = pd.qp(&cq, &cq).caps(CAPS).build_reset().map_err(text)?;
    let (state, attr, caps) = qp.query();
    ensure(state == QpState::Reset && attr.port.is_none(), || format!("{state} {attr:?}"))?;
    let enough = caps.max_send_wr >= 64 && caps.max_send_sge >= 2 && caps.max_inline_data >= 64;
    ensure(enough && cq.depth() >= 8, || format!("{caps:?}"))?;
    let pair = Pair::new(ctx)?;
    let (state, attr, _) = pair.a.query();
    let peer = attr.peer.ok_or("no peer")?;
    let sane = state == QpState::Rts
        && attr.dest_qpn == Some(pair.b.qpn())
        && attr.path_mtu == Some(Mtu::Mtu4096)
        && attr.port == Some(1)
        && attr.sq_psn == Some(pair.a.endpoint().psn)
        && attr.rq_psn == Some(pair.b.endpoint().psn)
        && (attr.retry_cnt, attr.timeout, attr.min_rnr_timer) == (Some(7), Some(14), Some(12))
        && peer.remote == ctx.gids()[0];
    ensure(sane, || format!("{attr:?}"))
}

fn in_use(ctx: &Context) -> Step {
    let pair = Pair::new(ctx)?;
    let Pair { a, b, sent, received, mr, pd } = pair;
    let (sent, error) = sent.destroy().err().ok_or("a queue in use was destroyed")?;
    ensure(matches!(error, VerbsError::Busy(_)), || error.to_string())?;
    let (pd, error) = pd.dealloc().err().ok_or("a domain in use was deallocated")?;
    ensure(matches!(error, VerbsError::Busy(_)), || error.to_string())?;
    a.destroy();
    b.destroy();
    sent.destroy().map_err(|(_, error)| text(error))?;
    received.destroy().map_err(|(_, error)| text(error))?;
    let (pd, _) = pd.dealloc().err().ok_or("a domain with a region was deallocated")?;
    mr.deregister().map_err(|(_, error)| text(error))?;
    pd.dealloc().map_err(|(_, error)| text(error))
}

fn changes_refused(ctx: &Context) -> Step {
    let cq = ctx.create_cq(8).map_err(text)?;
    let qp = ctx.alloc_pd().qp(&cq, &cq).build_reset().map_err(text)?;
    let refused = |attr: QpAttr, path: Option<PeerPath>| {
        let error = qp.modify(&ModifyAttr { attr, path }).err().ok_or("it was changed")?;
        Ok::<_, String>(error)
    };
    let to = |state| QpAttr { state: Some(state), ..QpAttr::default() };
    let error = refused(to(QpState::Rtr), None)?;
    let transition = matches!(error, VerbsError::Modify(ModifyError::Transition { .. }));
    ensure(transition, || error.to_string())?;
    let error = refused(to(QpState::Init), None)?;
    let missing = matches!(error, VerbsError::Modify(ModifyError::Missing { .. }));
    ensure(missing && error.to_string().contains("IBV_QP_PKEY_INDEX"), || error.to_string())?;
    qp.modify(&ModifyAttr::init(Access::ALL)).map_err(text)?;
    let rtr = QpAttr {
        path_mtu: Some(Mtu::Mtu1024),
        dest_qpn: Some(qp.qpn()),
        rq_psn: Some(rocinante::Psn::new(0)),
        max_dest_rd_atomic: Some(1),
        min_rnr_timer: Some(1),
        ..to(QpState::Rtr)
    };
    let other_family = PeerPath::new(IpAddr::from([0xfd00, 0, 0, 0, 0, 0, 0, 9]));
    let error = refused(rtr, Some(other_family))?;
    ensure(error.to_string().contains("one family"), || error.to_string())?;
    let greedy = QpAttr { max_dest_rd_atomic: Some(200), ..rtr };
    let error = refused(greedy, Some(PeerPath::new(ctx.gids()[0])))?;
    ensure(matches!(error, VerbsError::Invalid(_)), || error.to_string())?;
    // No neighbour answers there.
    let silent = PeerPath::new(IpAddr::from([203, 0, 113, 77]));
    let error = refused(rtr, Some(silent))?;
    ensure(matches!(error, VerbsError::Path(_)), || format!("{error:?}"))?;
    ensure(qp.state() == QpState::Init, || format!("{} after all", qp.state()))
}

fn requests_refused(ctx: &Context) -> Step {
    let pair = Pair::new(ctx)?;
    let send = SendOp::Send { imm: None };
    let sge = pair.mr.sge(0, 8);
    let caps = pair.a.query().2;
    let three = vec![sge; caps.max_send_sge as usize + 1];
    let long = vec![0; caps.max_inline_data as usize + 1];
    let (remote, rkey) = (pair.mr.address(), pair.mr.rkey());
    let odd = SendOp::FetchAdd { remote: remote + 4, rkey, add: 1 };
    for (op, data, expected) in [
        (send, SendData::Sges(&three[..]), PostError::TooManySges),
        (send, SendData::Inline(&long[..]), PostError::InlineTooLong),
        (SendOp::Read { remote, rkey }, SendData::Inline(&[0; 8]), PostError::InlineResponse),
        (odd, SendData::Sges(&[sge]), PostError::BadAtomic),
    ] {
        let error = pair.a.post_send(&[signaled(1, op, data)]).err().ok_or("it was posted")?;
        ensure(error.error == expected && error.index == 0, || format!("{error}"))?;
    }
    let fresh = pair.pd.qp(&pair.sent, &pair.received).build().map_err(text)?;
    let error =
        fresh.post_recv(&[RecvWr { wr_id: 0, sges: &three }]).err().ok_or("it was posted")?;
    ensure(error.error == PostError::TooManySges, || format!("{error}"))?;
    let reset = pair.pd.qp(&pair.sent, &pair.received).build_reset().map_err(text)?;
    let error = reset.post_recv(&[RecvWr { wr_id: 0, sges: &[] }]).err().ok_or("it was posted")?;
    ensure(error.error == PostError::State, || format!("{error}"))?;
    let wr = signaled(0, send, SendData::Sges(&[]));
    let error = reset.post_send(&[wr]).err().ok_or("it was posted")?;
    ensure(error.error == PostError::State, || format!("{error}"))
}

/// A list is posted up to its first fault, and a full queue says so.
fn lists(ctx: &Context) -> Step {
    let pair = Pair::new(ctx)?;
    let sge = [pair.mr.sge(0, 8)];
    let odd = SendOp::FetchAdd { remote: 4, rkey: pair.mr.rkey(), add: 1 };
    let list: Vec<SendWr<'_>> = (0..40)
        .map(|id| signaled(id, if id == 35 { odd } else { pair.write() }, SendData::Sges(&sge)))
        .collect();
    let error = pair.a.post_send(&list).err().ok_or("all were posted")?;
    let found = (error.index, error.error);
    ensure(found == (35, PostError::BadAtomic), || format!("{found:?}"))?;
    for id in 0..35 {
        succeeds(&pair.sent, id, WcOpcode::RdmaWrite)?;
    }
    let depth = pair.a.query().2.max_recv_wr as usize;
    let many = vec![RecvWr { wr_id: 0, sges: &sge }; depth + 1];
    let error = pair.a.post_recv(&many).err().ok_or("more receives than there is room for")?;
    let full = error.error == PostError::Full && (64..=depth).contains(&error.index);
    ensure(full, || format!("{error} of {depth}"))
}

fn unsignaled(ctx: &Context) -> Step {
    let pair = Pair::new(ctx)?;
    for round in 0..8u64 {
        let half = 32 << 10;
        for index in 0..32 {
            let byte = u8::try_from(round * 32 + index).unwrap_or(0);
            let offset = usize::try_from(index).unwrap_or(0) * 64;
            let remote = pair.mr.address() + (half + offset) as u64;
            let op = SendOp::Write { remote, rkey: pair.mr.rkey(), imm: None };
            let bytes = [byte; 64];
            let wr = signaled(index, op, SendData::Inline(&bytes));
            let last = index == 31;
            pair.a
                .post_send(&[SendWr { signaled: last, ..wr }])
                .map_err(|error| error.to_string())?;
        }
        succeeds(&pair.sent, 31, WcOpcode::RdmaWrite)?;
        for index in 0..32 {
            let found = pair.mr.to_vec(half + index * 64, 64);
            let byte = u8::try_from(round * 32).unwrap_or(0) + index as u8;
            ensure(found == [byte; 64], || format!("{found:?} instead of {byte}"))?;
        }
    }
    let more = pair.sent.poll_one().map_err(text)?;
    ensure(more.is_none(), || format!("{more:?} that nobody asked for"))
}

fn channel(ctx: &Context) -> Step {
    let channel: CompChannel = ctx.create_comp_channel().map_err(text)?;
    let cq = || ctx.create_cq_with(64, &channel).map_err(text);
    let pair = Pair::with(ctx, cq()?, cq()?)?;
    let sge = [pair.mr.sge(0, 8)];
    let write = [signaled(1, pair.write(), SendData::Sges(&sge))];
    let post = |list: &[SendWr<'_>]| pair.a.post_send(list).map_err(|error| error.to_string());
    // Not armed: no event.
    post(&write)?;
    succeeds(&pair.sent, 1, WcOpcode::RdmaWrite)?;
    let none = channel.wait_event(Some(A_WHILE));
    ensure(matches!(none, Err(VerbsError::TimedOut)), || format!("{none:?}"))?;
    // Armed: one event, of the right queue, and the descriptor says so.
    pair.sent.req_notify(false).map_err(text)?;
    post(&write)?;
    ensure(readable(channel.as_fd())?, || "the channel is not readable".into())?;
    let of = channel.wait_event(Some(SOON)).map_err(text)?;
    ensure(of == pair.sent && of != pair.received, || "an event of the other queue".into())?;
    succeeds(&pair.sent, 1, WcOpcode::RdmaWrite)?;
    post(&write)?;
    succeeds(&pair.sent, 1, WcOpcode::RdmaWrite)?;
    let none = channel.wait_event(Some(A_WHILE));
    ensure(matches!(none, Err(VerbsError::TimedOut)), || format!("{none:?}"))?;
    // Without a channel nothing can be armed.
    let bare = ctx.create_cq(1).map_err(text)?;
    ensure(bare.req_notify(false).is_err(), || "a queue without a channel was armed".into())?;
    // Another device's channel is of no use.
    let other = Context::open_device(ctx.name()).map_err(text)?;
    let foreign = other.create_cq_with(1, &channel).err().ok_or("another device's channel")?;
    ensure(matches!(foreign, VerbsError::Invalid(_)), || foreign.to_string())
}

fn drained_event(ctx: &Context) -> Step {
    let pair = Pair::new(ctx)?;
    let early = ctx.poll_async_event();
    ensure(early.is_none(), || format!("{early:?} too early"))?;
    let attr =
        QpAttr { state: Some(QpState::Sqd), sqd_async_notify: Some(true), ..QpAttr::default() };
    let sge = [pair.mr.sge(0, 4096)];
    let wr = signaled(1, pair.write(), SendData::Sges(&sge));
    pair.a.post_send(&[wr]).map_err(|error| error.to_string())?;
    pair.a.modify(&ModifyAttr { attr, path: None }).map_err(text)?;
    ensure(readable(ctx.async_fd())?, || "no event".into())?;
    let event = ctx.poll_async_event();
    let expected = AsyncEvent::Qp { qpn: pair.a.qpn(), event: QpEvent::SqDrained };
    ensure(event == Some(expected), || format!("{event:?}"))?;
    let more = ctx.poll_async_event();
    ensure(more.is_none(), || format!("{more:?}"))
}

/// More completions than there is room for.
fn overflow(ctx: &Context) -> Step {
    let small = ctx.create_cq(4).map_err(text)?;
    let (number, depth) = (small.number(), small.depth());
    let pair = Pair::with(ctx, small, ctx.create_cq(16).map_err(text)?)?;
    let sge = [pair.mr.sge(0, 8)];
    let list: Vec<SendWr<'_>> =
        (0..60).map(|id| signaled(id, pair.write(), SendData::Sges(&sge))).collect();
    ensure(depth < list.len(), || format!("room for {depth}"))?;
    pair.a.post_send(&list).map_err(|error| error.to_string())?;
    ensure(readable(ctx.async_fd())?, || "no event".into())?;
    let event = ctx.poll_async_event();
    let expected = AsyncEvent::CqOverflow { cq: number };
    ensure(event == Some(expected), || format!("{event:?} instead of {expected:?}"))
}

fn regions(ctx: &Context) -> Step {
    let pair = Pair::new(ctx)?;
    let region = pair.pd.allocate(8192, Access::ALL).map_err(text)?;
    let (address, rkey) = (region.address(), region.rkey());
    let write = SendOp::Write { remote: address + 100, rkey, imm: None };
    pair.mr.write(0, b"into the region");
    let sge = [pair.mr.sge(0, 15)];
    let wr = [signaled(1, write, SendData::Sges(&sge))];
    let post = || pair.a.post_send(&wr).map_err(|error| error.to_string());
    post()?;
    succeeds(&pair.sent, 1, WcOpcode::RdmaWrite)?;
    let found = region.to_vec(100, 15);
    ensure(found == b"into the region", || format!("{found:?}"))?;
    ensure(region.check(address, 8192, Access::REMOTE_WRITE).is_ok(), || "check".into())?;
    ensure(region.check(address, 8193, Access::REMOTE_WRITE).is_err(), || "beyond".into())?;
    region.deregister().map_err(|(_, error)| text(error))?;
    post()?;
    let wc = pair.sent.wait_one(SOON).map_err(text)?;
    ensure(wc.status == WcStatus::RemAccessErr, || format!("with a stale key: {wc:?}"))?;
    let error = pair.pd.allocate(16, Access::REMOTE_WRITE).err().ok_or("contradictory flags")?;
    ensure(matches!(error, VerbsError::Invalid(_)), || error.to_string())
}

fn counters(ctx: &Context) -> Step {
    let before = ctx.counters();
    let pair = Pair::new(ctx)?;
    let sge = [pair.mr.sge(0, 8192)];
    let wr = signaled(1, pair.write(), SendData::Sges(&sge));
    pair.a.post_send(&[wr]).map_err(|error| error.to_string())?;
    succeeds(&pair.sent, 1, WcOpcode::RdmaWrite)?;
    // The kernel reads a device's counters anew only after a while: 10 ms unless set otherwise ("lifespan").
    let deadline = Instant::now() + Duration::from_secs(5);
    loop {
        let after = ctx.counters();
        // Two packets there, and an acknowledgement back.
        let sent = after.transport.sent_pkts - before.transport.sent_pkts;
        let received = after.transport.rcvd_pkts - before.transport.rcvd_pkts;
        if sent >= 3 && received >= 3 {
            return Ok(());
        }
        ensure(Instant::now() < deadline, || format!("{sent} sent, {received} received"))?;
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Four threads with a pair each on one domain, comparing memory.
fn threads(ctx: &Context) -> Step {
    let pairs: Step<Vec<Pair>> = (0..4).map(|_| Pair::new(ctx)).collect();
    let pairs = pairs?;
    std::thread::scope(|scope| {
        let running: Vec<_> = pairs.iter().map(|pair| scope.spawn(|| busy(pair))).collect();
        running
            .into_iter()
            .try_for_each(|thread| thread.join().map_err(|_| "a thread panicked".to_owned())?)
    })
}

fn busy(pair: &Pair) -> Step {
    let (half, rkey) = (32 << 10, pair.mr.rkey());
    for round in 0..50u8 {
        let len = 1 + usize::from(round) * 150;
        pair.mr.write(0, &vec![round; len]);
        let sge = [pair.mr.sge(0, len)];
        let wr = signaled(1, pair.write(), SendData::Sges(&sge));
        pair.a.post_send(&[wr]).map_err(|error| error.to_string())?;
        succeeds(&pair.sent, 1, WcOpcode::RdmaWrite)?;
        ensure(pair.mr.to_vec(half, len) == vec![round; len], || format!("WRITE {round}"))?;
        let back = [pair.mr.sge(16 << 10, len)];
        let remote = pair.mr.address() + half as u64;
        let wr = signaled(2, SendOp::Read { remote, rkey }, SendData::Sges(&back));
        pair.b.post_send(&[wr]).map_err(|error| error.to_string())?;
        succeeds(&pair.sent, 2, WcOpcode::RdmaRead)?;
        ensure(pair.mr.to_vec(16 << 10, len) == vec![round; len], || format!("READ {round}"))?;
    }
    Ok(())
}

/// Whether a descriptor becomes readable soon.
fn readable(fd: BorrowedFd<'_>) -> Step<bool> {
    let mut fds = [PollFd::new(fd, PollFlags::POLLIN)];
    let limit = PollTimeout::try_from(SOON).map_err(|error| error.to_string())?;
    poll(&mut fds, limit).map(|ready| ready == 1).map_err(|error| error.to_string())
}

fn ensure(holds: bool, otherwise: impl FnOnce() -> String) -> Step {
    if holds { Ok(()) } else { Err(otherwise()) }
}

/// For `map_err`.
#[allow(clippy::needless_pass_by_value)]
fn text(error: VerbsError) -> String {
    error.to_string()
}
