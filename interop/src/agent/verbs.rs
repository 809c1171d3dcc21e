//! Does what it is asked with Rocinante's API: on its own devices, and on the kernel's through the system's libibverbs.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use rocinante::{
    Access, AsyncEvent, Atomics, Backend, Budget, CompChannel, Context, Cq, Key, ModifyAttr, Mr,
    Mtu, OpenOptions, Pd, PeerPath, Psn, Qp, QpAttr, QpEvent, QpState, Qpn, RecvWr, SendData,
    SendOp, SendWr, Sge, VerbsError, Wc, WcOpcode,
};
use rocinante_cli::lab::Netns;

use super::proto::{
    About, Completion, Connection, Op, Opcode, Peer, Range, Remote, Reply, Request, Send, State,
};
use rocinante_tests::harness::pattern;

use super::machine::Kind;
use super::{Agent, CQ_DEPTH, ELEMENTS, INLINE, QUEUE_DEPTH, difference};

type Result<T> = std::result::Result<T, String>;

/// A device with what was made of it.
#[derive(Debug)]
pub struct Verbs {
    netns: Option<Netns>,
    backend: Option<Backend>,
    credits: bool,
    qps: Vec<Option<Qp>>,
    regions: Vec<Mr>,
    opened: Option<Opened>,
    about: Option<About>,
}

#[derive(Debug)]
struct Opened {
    cq: Cq,
    channel: CompChannel,
    pd: Pd,
    ctx: Context,
}

impl Agent for Verbs {
    fn ask(&mut self, request: &Request) -> Reply {
        self.step(request).unwrap_or_else(Reply::Failed)
    }
}

impl Opened {
    fn about(&self) -> About {
        let attr = self.ctx.query_device();
        let kind = match &attr.hardware {
            None => Kind::Rocinante,
            Some(_) => Kind::of(self.ctx.name()),
        };
        // Hardware does not tell how much data a request may carry with it.
        let carries = || {
            let builder = self.pd.qp(&self.cq, &self.cq).max_inline_data(INLINE);
            builder.build_reset().is_ok()
        };
        About {
            kind,
            max_rd_atomic: u8::try_from(attr.limits.max_qp_rd_atom).unwrap_or(u8::MAX),
            atomics: attr.hardware.is_none_or(|attr| attr.atomics != Atomics::None),
            inline: kind != Kind::Device || carries(),
            active_mtu: attr.active_mtu.bytes(),
        }
    }
}

impl Verbs {
    /// Rocinante's device in `netns`, or in the present namespace, with this backend, that is not open yet; with `credits` it tells its peers how many
    /// receives it has posted.
    #[must_use]
    pub fn soft(netns: Option<&Netns>, backend: Backend, credits: bool) -> Self {
        Self { netns: netns.cloned(), backend: Some(backend), credits, ..Self::kernel() }
    }

    /// A device of the kernel's that is not open yet.
    #[must_use]
    pub fn kernel() -> Self {
        Self {
            netns: None,
            backend: None,
            credits: false,
            qps: vec![],
            regions: vec![],
            opened: None,
            about: None,
        }
    }

    /// Runs `work` in the namespace of the device.
    fn inside<T: std::marker::Send>(
        &self,
        work: impl FnOnce() -> T + std::marker::Send,
    ) -> Result<T> {
        match &self.netns {
            Some(netns) => netns.run(work).map_err(|error| error.to_string()),
            None => Ok(work()),
        }
    }

    fn step(&mut self, request: &Request) -> Result<Reply> {
        match request {
            Request::Describe { .. }
            | Request::Check { .. }
            | Request::Start(_)
            | Request::Ended { .. } => return Err("that is asked of a machine's agent".into()),
            Request::Open { name, address } => {
                return self.open(name, *address).map(Reply::Opened);
            }
            Request::Region { len, access } => {
                let region = self.opened()?.pd.allocate(*len, access_of(*access)?);
                let region = region.map_err(text)?;
                let remote = Remote { address: region.address(), rkey: region.rkey().0 };
                self.regions.push(region);
                return Ok(Reply::Region(remote));
            }
            Request::Fill { range, seed } => {
                self.region(range)?.write(range.offset, &pattern(range.len, *seed));
            }
            Request::Compare { range, with } => {
                let bytes = self.region(range)?.to_vec(range.offset, range.len);
                return Ok(Reply::Difference(difference(&bytes, *with)));
            }
            Request::Store { at, value } => {
                self.region(at)?.write(at.offset, &value.to_ne_bytes());
            }
            Request::Load(at) => {
                let bytes = self.region(at)?.to_vec(at.offset, 8);
                let bytes = bytes.try_into().map_err(|_| "no eight bytes")?;
                return Ok(Reply::Value(u64::from_ne_bytes(bytes)));
            }
            Request::Qp { access } => return self.create_qp(*access),
            Request::Prepare { qp, access } => {
                let init = ModifyAttr::init(access_of(*access)?);
                self.qp(*qp)?.modify(&init).map_err(text)?;
            }
            Request::Connect { qp, peer, how } => self.connect(*qp, peer, how)?,
            Request::Modify { qp, state } => {
                let change = ModifyAttr::state(qp_state(*state));
                self.qp(*qp)?.modify(&change).map_err(text)?;
            }
            Request::Query { qp } => return Ok(Reply::State(state_of(self.qp(*qp)?.state()))),
            Request::Destroy { qp } => {
                self.qps.get_mut(*qp).and_then(Option::take).ok_or("no such queue pair")?;
            }
            Request::Send { qp, list } => {
                list.iter().try_for_each(|send| self.post_send(*qp, send))?;
            }
            Request::Recv { qp, first, list } => {
                for (wr_id, ranges) in (*first..).zip(list) {
                    let sges = self.elements(ranges)?;
                    let posted = self.qp(*qp)?.post_recv(&[RecvWr { wr_id, sges: &sges }]);
                    posted.map_err(|error| error.to_string())?;
                }
            }
            Request::Poll { count, timeout_ms } => return self.poll(*count, *timeout_ms),
            Request::Arm { solicited } => {
                self.opened()?.cq.req_notify(*solicited).map_err(text)?;
            }
            Request::Event { timeout_ms } => {
                let limit = Some(Duration::from_millis(*timeout_ms));
                return match self.opened()?.channel.wait_event(limit) {
                    Ok(_) => Ok(Reply::Event(true)),
                    Err(VerbsError::TimedOut) => Ok(Reply::Event(false)),
                    Err(error) => Err(error.to_string()),
                };
            }
            Request::Async { timeout_ms } => return self.wait_for_async(*timeout_ms),
        }
        Ok(Reply::Done)
    }

    fn opened(&self) -> Result<&Opened> {
        self.opened.as_ref().ok_or_else(|| "no device is open".into())
    }

    fn qp(&self, index: usize) -> Result<&Qp> {
        let qp = self.qps.get(index).and_then(Option::as_ref);
        qp.ok_or_else(|| format!("there is no queue pair {index}"))
    }

    fn region(&self, range: &Range) -> Result<&Mr> {
        let region = self.regions.get(range.region).ok_or("no such region")?;
        if range.offset.checked_add(range.len).is_none_or(|end| end > region.len()) {
            return Err(format!("{range:?} is not inside the region"));
        }
        Ok(region)
    }

    fn open(&mut self, name: &str, address: IpAddr) -> Result<About> {
        let options = match self.backend {
            Some(backend) => OpenOptions::new().netdev(backend).advertise_credits(self.credits),
            None => OpenOptions::new().device(name),
        };
        let ctx = self.inside(|| options.open(address))?.map_err(text)?;
        let channel = ctx.create_comp_channel().map_err(text)?;
        let cq = ctx.create_cq_with(CQ_DEPTH, &channel).map_err(text)?;
        let opened = Opened { cq, channel, pd: ctx.alloc_pd(), ctx };
        let about = opened.about();
        (self.opened, self.about) = (Some(opened), Some(about));
        Ok(about)
    }

    fn create_qp(&mut self, access: u32) -> Result<Reply> {
        let access = access_of(access)?;
        let Opened { pd, cq, .. } = self.opened()?;
        let builder = pd.qp(cq, cq).max_send_wr(QUEUE_DEPTH).max_recv_wr(QUEUE_DEPTH);
        let inline = if self.about.is_none_or(|about| about.inline) { INLINE } else { 0 };
        let builder = builder.max_sge(ELEMENTS).max_inline_data(inline);
        let qp = builder.build_reset().map_err(text)?;
        qp.modify(&ModifyAttr::init(access)).map_err(text)?;
        let qpn = qp.qpn().value();
        self.qps.push(Some(qp));
        Ok(Reply::Qp { qpn })
    }

    fn connect(&self, qp: usize, peer: &Peer, how: &Connection) -> Result<()> {
        let rtr = QpAttr {
            state: Some(QpState::Rtr),
            path_mtu: Some(Mtu::from_bytes(how.mtu).ok_or("no such path MTU")?),
            dest_qpn: Some(Qpn::new(peer.qpn)),
            rq_psn: Some(Psn::new(peer.psn)),
            max_dest_rd_atomic: Some(how.rd_atomic),
            min_rnr_timer: Some(how.min_rnr_timer),
            ..QpAttr::default()
        };
        let path = PeerPath { budget: Budget::STRANGER, ..PeerPath::new(peer.address) };
        let rts = QpAttr {
            state: Some(QpState::Rts),
            sq_psn: Some(Psn::new(how.psn)),
            max_rd_atomic: Some(how.rd_atomic),
            retry_cnt: Some(how.retry_cnt),
            rnr_retry: Some(how.rnr_retry),
            timeout: Some(how.timeout),
            ..QpAttr::default()
        };
        let qp = self.qp(qp)?;
        // Connecting looks up routes, which are those of the container.
        let connected = self.inside(|| {
            qp.modify(&ModifyAttr { attr: rtr, path: Some(path) })?;
            qp.modify(&ModifyAttr { attr: rts, path: None })
        });
        connected?.map_err(text)
    }

    fn elements(&self, ranges: &[Range]) -> Result<Vec<Sge>> {
        ranges.iter().map(|r| Ok(self.region(r)?.sge(r.offset, r.len))).collect()
    }

    fn post_send(&self, qp: usize, send: &Send) -> Result<()> {
        let elements = self.elements(&send.ranges)?;
        let bytes: Result<Vec<Vec<u8>>> = match send.inline {
            true => {
                send.ranges.iter().map(|r| Ok(self.region(r)?.to_vec(r.offset, r.len))).collect()
            }
            false => Ok(vec![]),
        };
        let bytes = bytes?.concat();
        let data = match send.inline {
            true => SendData::Inline(&bytes),
            false => SendData::Sges(&elements),
        };
        let wr = SendWr {
            wr_id: send.wr_id,
            op: operation(send.op),
            data,
            signaled: send.signaled,
            solicited: send.solicited,
            fence: send.fence,
        };
        self.qp(qp)?.post_send(&[wr]).map_err(|error| error.to_string())
    }

    fn poll(&self, count: usize, timeout_ms: u64) -> Result<Reply> {
        let deadline = Instant::now() + Duration::from_millis(timeout_ms);
        let mut found = Vec::new();
        while found.len() < count {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.opened()?.cq.wait_one(left) {
                Ok(wc) => found.push(completion(&wc)),
                Err(VerbsError::TimedOut) => break,
                Err(error) => return Err(error.to_string()),
            }
        }
        Ok(Reply::Completions(found))
    }

    fn wait_for_async(&self, timeout_ms: u64) -> Result<Reply> {
        let deadline = Instant::now() + Duration::from_millis(timeout_ms);
        loop {
            if let Some(event) = self.opened()?.ctx.poll_async_event() {
                return Ok(Reply::Async(Some(event_name(&event))));
            }
            if Instant::now() > deadline {
                return Ok(Reply::Async(None));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

fn access_of(bits: u32) -> Result<Access> {
    Access::from_bits(bits).ok_or_else(|| format!("unknown access {bits:#x}"))
}

fn operation(op: Op) -> SendOp {
    let imm_of = |imm: Option<u32>| imm.map(u32::to_be_bytes);
    match op {
        Op::Send { imm } => SendOp::Send { imm: imm_of(imm) },
        Op::Write { remote, rkey, imm } => {
            SendOp::Write { remote, rkey: Key(rkey), imm: imm_of(imm) }
        }
        Op::Read { remote, rkey } => SendOp::Read { remote, rkey: Key(rkey) },
        Op::CompareSwap { remote, rkey, compare, swap } => {
            SendOp::CompareSwap { remote, rkey: Key(rkey), compare, swap }
        }
        Op::FetchAdd { remote, rkey, add } => SendOp::FetchAdd { remote, rkey: Key(rkey), add },
    }
}

fn completion(wc: &Wc) -> Completion {
    let opcode = match wc.opcode {
        WcOpcode::Send => Opcode::Send,
        WcOpcode::RdmaWrite => Opcode::Write,
        WcOpcode::RdmaRead => Opcode::Read,
        WcOpcode::CompSwap => Opcode::CompareSwap,
        WcOpcode::FetchAdd => Opcode::FetchAdd,
        WcOpcode::Recv => Opcode::Recv,
        WcOpcode::RecvRdmaWithImm => Opcode::RecvWriteImm,
    };
    Completion {
        wr_id: wc.wr_id,
        qpn: wc.qpn.value(),
        status: wc.status.name().to_owned(),
        opcode,
        byte_len: wc.byte_len,
        imm: wc.imm.map(u32::from_be_bytes),
    }
}

fn qp_state(state: State) -> QpState {
    match state {
        State::Reset => QpState::Reset,
        State::Init => QpState::Init,
        State::Rtr => QpState::Rtr,
        State::Rts => QpState::Rts,
        State::Sqd => QpState::Sqd,
        State::Err => QpState::Err,
    }
}

fn state_of(state: QpState) -> State {
    match state {
        QpState::Reset => State::Reset,
        QpState::Init => State::Init,
        QpState::Rtr => State::Rtr,
        QpState::Rts => State::Rts,
        QpState::Sqd => State::Sqd,
        // Of no connection that an agent makes.
        QpState::Sqe => State::Err,
        QpState::Err => State::Err,
    }
}

/// As `ibv_event_type_str(3)` has it.
fn event_name(event: &AsyncEvent) -> String {
    match event {
        AsyncEvent::Qp { event: QpEvent::CommEst, .. } => "communication established".into(),
        AsyncEvent::Qp { event: QpEvent::Fatal, .. } => {
            "local work queue catastrophic error".into()
        }
        AsyncEvent::Qp { event: QpEvent::ReqErr, .. } => {
            "invalid request local work queue error".into()
        }
        AsyncEvent::Qp { event: QpEvent::AccessErr, .. } => {
            "local access violation work queue error".into()
        }
        AsyncEvent::Qp { event: QpEvent::LastWqeReached, .. } => "last WQE reached".into(),
        AsyncEvent::SrqLimitReached { .. } => "SRQ limit reached".into(),
        other => format!("{other:?}"),
    }
}

/// For `map_err`.
#[allow(clippy::needless_pass_by_value)]
fn text(error: VerbsError) -> String {
    error.to_string()
}
