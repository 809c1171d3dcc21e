//! Executes verbs with Rocinante's API: on its own devices, and on the kernel's through the
//! system's libibverbs.
#![allow(clippy::needless_pass_by_value, reason = "arguments of verbs are theirs")]

mod windows;

use std::net::IpAddr;
use std::time::{Duration, Instant};

use rocinante::device::{Atomics, Backend};
use rocinante::stats::Counters;
use rocinante::verbs::{
    FlushLevel, GRH_LEN, Key, ModifyAttr, Mtu, PeerPath, Placement, Psn, QpAttr, QpType, Qpn,
    SendData, SendOp, Sge,
};
use rocinante::{
    Access, Ah, CompChannel, Context, Cq, Mr, Mw, OpenOptions, Pd, Qp, RecvWr, SendWr, Srq,
    VerbsError, Wc,
};
use rocinante_lab::Netns;
use rocinante_tests::harness::pattern;

use super::machine::Kind;
use super::proto::{
    About, Completion, Connection, Difference, Heard, Op, Peer, QpState, Range, Remote, Request,
    Send, Service,
};
use super::words::{access_of, completion, event_name, service, text};
use super::{Agent, Answer, CQ_DEPTH, ELEMENTS, INLINE, QUEUE_DEPTH, difference};
use crate::matrix::ours::Ours;

type Result<T> = std::result::Result<T, String>;

const NO_REGION: &str = "no such region";

/// A device with its objects.
#[derive(Debug)]
pub struct Verbs {
    netns: Option<Netns>,
    backend: Option<Backend>,
    credits: bool,
    qps: Vec<Option<Qp>>,
    srqs: Vec<Srq>,
    handles: Vec<Ah>,
    /// The last completion of a datagram that was taken.
    last: Option<Wc>,
    /// Before `regions`: windows are deallocated before the regions to which they are bound.
    windows: Vec<Option<Mw>>,
    regions: Vec<Option<Mr>>,
    opened: Option<Opened>,
    about: Option<About>,
    address: Option<IpAddr>,
    /// A program of another project, and its start.
    pub(super) running: Option<(Ours, Instant)>,
}

#[derive(Debug)]
struct Opened {
    cq: Cq,
    channel: CompChannel,
    pd: Pd,
    ctx: Context,
}

impl Agent for Verbs {
    fn ask(&mut self, request: Request) -> Answer {
        self.answer(request)
    }
}

impl Opened {
    fn about(&self) -> About {
        let attr = self.ctx.query_device();
        let kind = match &attr.hardware {
            None => Kind::Rocinante,
            Some(_) => Kind::of(self.ctx.name()),
        };
        // Hardware does not report its limit of inline data.
        let carries = || {
            let builder =
                self.pd.qp(&self.cq, &self.cq).access(Access::ALL).max_inline_data(INLINE);
            builder.build_reset().is_ok()
        };
        About {
            kind,
            max_rd_atomic: u8::try_from(attr.limits.max_qp_rd_atom).unwrap_or(u8::MAX),
            atomics: attr.hardware.is_none_or(|attr| attr.atomics != Atomics::None),
            atomic_write: attr.optional.atomic_write,
            windows: [attr.windows.type_1, attr.windows.type_2a || attr.windows.type_2b],
            flush: attr.optional.flush_global,
            inline: kind != Kind::Device || carries(),
            active_mtu: attr.active_mtu.bytes(),
        }
    }
}

impl Verbs {
    /// Rocinante's device in `netns`, or in the present namespace, with this backend; not open yet.
    /// With `credits`, its acknowledgements announce the number of posted receives.
    #[must_use]
    pub fn soft(netns: Option<&Netns>, backend: Backend, credits: bool) -> Self {
        Self { netns: netns.cloned(), backend: Some(backend), credits, ..Self::kernel() }
    }

    /// A device of the kernel, not open yet.
    #[must_use]
    pub fn kernel() -> Self {
        Self {
            netns: None,
            backend: None,
            credits: false,
            qps: vec![],
            srqs: vec![],
            handles: vec![],
            last: None,
            windows: vec![],
            regions: vec![],
            opened: None,
            about: None,
            address: None,
            running: None,
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

    pub(super) fn region(&mut self, len: usize, access: u32) -> Result<Remote> {
        let pd = self.opened()?.pd.clone();
        self.allocate(&pd, len, access_of(access)?)
    }

    pub(super) fn foreign_region(&mut self, len: usize, access: u32) -> Result<Remote> {
        let pd = self.opened()?.ctx.alloc_pd();
        self.allocate(&pd, len, access_of(access)?)
    }

    pub(super) fn deregister(&mut self, region: usize) -> Result<()> {
        let region = self.regions.get_mut(region).and_then(Option::take).ok_or(NO_REGION)?;
        region.deregister().map_err(|refused| text(refused.error))
    }

    pub(super) fn put(&mut self, region: usize, offset: usize, bytes: Vec<u8>) -> Result<()> {
        let range = Range { region, offset, len: bytes.len() };
        self.mr(&range)?.write(offset, &bytes);
        Ok(())
    }

    pub(super) fn fill(&mut self, range: Range, seed: u64) -> Result<()> {
        self.mr(&range)?.write(range.offset, &pattern(range.len, seed));
        Ok(())
    }

    pub(super) fn compare(
        &self,
        range: Range,
        with: Option<(u64, usize)>,
    ) -> Result<Option<Difference>> {
        Ok(difference(&self.bytes(range)?, with))
    }

    pub(super) fn store(&mut self, offset: usize, value: u64) -> Result<()> {
        self.put(0, offset, value.to_ne_bytes().to_vec())
    }

    pub(super) fn load(&self, offset: usize) -> Result<u64> {
        let bytes = self.bytes(Range { region: 0, offset, len: 8 })?;
        bytes.try_into().map(u64::from_ne_bytes).map_err(|_| "no eight bytes".into())
    }

    pub(super) fn bytes(&self, range: Range) -> Result<Vec<u8>> {
        Ok(self.mr(&range)?.to_vec(range.offset, range.len))
    }

    pub(super) fn make_srq(&mut self, depth: u32) -> Result<()> {
        let srq = self.opened()?.pd.create_srq(depth, ELEMENTS).map_err(text)?;
        self.srqs.push(srq);
        Ok(())
    }

    pub(super) fn arm_srq(&self, srq: usize, limit: u32) -> Result<()> {
        self.srq(srq)?.arm(limit).map_err(text)
    }

    pub(super) fn attach(&self, qp: usize, group: IpAddr) -> Result<()> {
        // The group's socket must be in the container's namespace.
        let qp = self.qp(qp)?;
        self.inside(|| qp.attach_mcast(group))?.map_err(text)
    }

    pub(super) fn detach(&self, qp: usize, group: IpAddr) -> Result<()> {
        self.qp(qp)?.detach_mcast(group).map_err(text)
    }

    pub(super) fn prepare(&self, qp: usize, access: u32) -> Result<()> {
        self.qp(qp)?.modify(&ModifyAttr::init(access_of(access)?)).map_err(text)
    }

    pub(super) fn change_state(&self, qp: usize, state: usize) -> Result<()> {
        let state = QpState::ALL.get(state).ok_or("no such state")?;
        self.qp(qp)?.modify(&ModifyAttr::state(*state)).map_err(text)
    }

    pub(super) fn query(&self, qp: usize) -> Result<usize> {
        Ok(self.qp(qp)?.state() as usize)
    }

    pub(super) fn destroy(&mut self, qp: usize) -> Result<()> {
        let qp = self.qps.get_mut(qp).and_then(Option::take);
        qp.map(drop).ok_or_else(|| "no such queue pair".into())
    }

    pub(super) fn send(&self, qp: usize, list: Vec<Send>) -> Result<()> {
        list.iter().try_for_each(|send| self.post_send(qp, send))
    }

    pub(super) fn recv(&self, qp: usize, first: u64, list: Vec<Vec<Range>>) -> Result<()> {
        let qp = self.qp(qp)?;
        self.each_receive(first, &list, |wr| qp.post_recv(&[wr]).map_err(|e| e.to_string()))
    }

    pub(super) fn recv_shared(&self, srq: usize, first: u64, list: Vec<Vec<Range>>) -> Result<()> {
        let srq = self.srq(srq)?;
        self.each_receive(first, &list, |wr| srq.post_recv(&[wr]).map_err(|e| e.to_string()))
    }

    fn each_receive(
        &self,
        first: u64,
        list: &[Vec<Range>],
        post: impl Fn(RecvWr<'_>) -> Result<()>,
    ) -> Result<()> {
        let mut numbered = (first..).zip(list);
        numbered
            .try_for_each(|(wr_id, ranges)| post(RecvWr { wr_id, sges: &self.elements(ranges)? }))
    }

    pub(super) fn arm(&self, solicited: bool) -> Result<()> {
        self.opened()?.cq.req_notify(solicited).map_err(text)
    }

    pub(super) fn event(&self, timeout_ms: u64) -> Result<bool> {
        match self.opened()?.channel.wait_event(Some(Duration::from_millis(timeout_ms))) {
            Ok(_) => Ok(true),
            Err(VerbsError::TimedOut) => Ok(false),
            Err(error) => Err(error.to_string()),
        }
    }

    pub(super) fn drops(&self) -> Result<Vec<(String, u64)>> {
        let drops = self.opened()?.ctx.counters().drops;
        Ok(drops.iter().map(|(reason, count)| (reason.to_owned(), count)).collect())
    }

    pub(super) fn heard(&self) -> Result<Heard> {
        let Counters { rcvd_pkts, duplicate_request, out_of_seq_request, .. } =
            self.opened()?.ctx.counters().transport;
        let (duplicates, gaps) = (duplicate_request, out_of_seq_request);
        Ok(Heard { packets: rcvd_pkts, duplicates, gaps })
    }

    pub(super) fn counters(&self) -> Result<String> {
        self.opened().map(|opened| counters(&opened.ctx))
    }

    fn opened(&self) -> Result<&Opened> {
        self.opened.as_ref().ok_or_else(|| "no device is open".into())
    }

    fn qp(&self, index: usize) -> Result<&Qp> {
        let qp = self.qps.get(index).and_then(Option::as_ref);
        qp.ok_or_else(|| format!("there is no queue pair {index}"))
    }

    fn srq(&self, index: usize) -> Result<&Srq> {
        self.srqs.get(index).ok_or_else(|| format!("there is no shared receive queue {index}"))
    }

    fn mr(&self, range: &Range) -> Result<&Mr> {
        let region = self.regions.get(range.region).and_then(Option::as_ref).ok_or(NO_REGION)?;
        if range.offset.checked_add(range.len).is_none_or(|end| end > region.len()) {
            return Err(format!("{range:?} is not inside the region"));
        }
        Ok(region)
    }

    pub(super) fn open_device(&mut self, name: String, address: IpAddr) -> Result<About> {
        let options = match self.backend {
            Some(backend) => OpenOptions::new().netdev(backend).advertise_credits(self.credits),
            None => OpenOptions::new().device(&name),
        };
        let ctx = self.inside(|| options.open(address))?.map_err(text)?;
        let channel = ctx.create_comp_channel().map_err(text)?;
        let cq = ctx.create_cq_with(CQ_DEPTH, &channel).map_err(text)?;
        let opened = Opened { cq, channel, pd: ctx.alloc_pd(), ctx };
        let about = opened.about();
        (self.opened, self.about) = (Some(opened), Some(about));
        self.address = Some(address);
        Ok(about)
    }

    fn allocate(&mut self, pd: &Pd, len: usize, access: Access) -> Result<Remote> {
        let region = pd.allocate(len, access).map_err(text)?;
        let remote = Remote { address: region.address(), rkey: region.rkey().0 };
        self.regions.push(Some(region));
        Ok(remote)
    }

    pub(super) fn create_qp(
        &mut self,
        of: Service,
        access: u32,
        srq: Option<usize>,
    ) -> Result<u32> {
        let Opened { pd, cq, .. } = self.opened()?;
        let (qp_type, qkey) = service(of);
        let builder =
            pd.qp(cq, cq).access(Access::ALL).max_send_wr(QUEUE_DEPTH).max_recv_wr(QUEUE_DEPTH);
        let inline = if self.about.is_none_or(|about| about.inline) { INLINE } else { 0 };
        let builder = builder.max_sge(ELEMENTS).max_inline_data(inline).qp_type(qp_type);
        let builder = match srq {
            Some(srq) => builder.srq(self.srq(srq)?),
            None => builder,
        };
        let qp = builder.build_reset().map_err(text)?;
        let init = match qp_type {
            QpType::Ud => ModifyAttr::init_datagram(qkey),
            QpType::Rc | QpType::Uc => ModifyAttr::init(access_of(access)?),
        };
        qp.modify(&init).map_err(text)?;
        let qpn = qp.qpn().value();
        self.qps.push(Some(qp));
        Ok(qpn)
    }

    pub(super) fn handle(&mut self, address: IpAddr) -> Result<()> {
        let Opened { pd, ctx, .. } = self.opened()?;
        let same = |gid: &IpAddr| gid.is_ipv4() == address.is_ipv4();
        let own =
            self.address.filter(same).and_then(|own| ctx.gids().iter().position(|gid| *gid == own));
        let own = own.ok_or("the device has no address of that family")?;
        let handle =
            self.inside(|| pd.create_ah(&PeerPath::new(address).sgid_index(own)))?.map_err(text)?;
        self.handles.push(handle);
        Ok(())
    }

    pub(super) fn handle_of_last(&mut self, grh: Range) -> Result<()> {
        let last = self.last.ok_or("no datagram has come")?;
        let header: [u8; GRH_LEN] = self
            .mr(&grh)?
            .to_vec(grh.offset, GRH_LEN)
            .try_into()
            .map_err(|_| "not the bytes of a header")?;
        let pd = &self.opened()?.pd;
        self.handles.push(self.inside(|| pd.create_ah_from_wc(&last, &header))?.map_err(text)?);
        Ok(())
    }

    pub(super) fn connect(&self, qp: usize, peer: Peer, how: Connection) -> Result<()> {
        let qp = self.qp(qp)?;
        let attr = QpAttr {
            path_mtu: Some(Mtu::from_bytes(how.mtu).ok_or("no such path MTU")?),
            dest_qpn: Some(Qpn::new(peer.qpn)),
            rq_psn: Some(Psn::new(peer.psn)),
            max_dest_rd_atomic: Some(how.rd_atomic),
            min_rnr_timer: Some(how.min_rnr_timer),
            sq_psn: Some(Psn::new(how.psn)),
            max_rd_atomic: Some(how.rd_atomic),
            retry_cnt: Some(how.retry_cnt),
            rnr_retry: Some(how.rnr_retry),
            timeout: Some(how.timeout),
            ..QpAttr::default()
        };
        let [_, rtr, rts] = attr.steps(qp.qp_type());
        let path = (qp.qp_type() != QpType::Ud).then(|| PeerPath::new(peer.address));
        // Connecting looks up routes, which must be the container's.
        let connected = self.inside(|| {
            qp.modify(&ModifyAttr { attr: rtr, path })?;
            qp.modify(&ModifyAttr { attr: rts, path: None })
        });
        connected?.map_err(text)
    }

    fn elements(&self, ranges: &[Range]) -> Result<Vec<Sge>> {
        ranges.iter().map(|r| Ok(self.mr(r)?.sge(r.offset, r.len))).collect()
    }

    fn post_send(&self, qp: usize, send: &Send) -> Result<()> {
        let elements = self.elements(&send.ranges)?;
        let bytes: Result<Vec<Vec<u8>>> = match send.inline {
            true => send.ranges.iter().map(|r| Ok(self.mr(r)?.to_vec(r.offset, r.len))).collect(),
            false => Ok(vec![]),
        };
        let bytes = bytes?.concat();
        let data = match send.inline {
            true => SendData::Inline(&bytes),
            false => SendData::Sges(&elements),
        };
        let mut wr =
            SendWr::new(self.operation(send.op)?, data).wr_id(send.wr_id).signaled(send.signaled);
        wr.solicited = send.solicited;
        wr.fence = send.fence;
        self.qp(qp)?.post_send(&[wr]).map_err(|error| error.to_string())
    }

    fn operation(&self, op: Op) -> Result<SendOp> {
        let imm_of = |imm: Option<u32>| imm.map(u32::to_be_bytes);
        Ok(match op {
            Op::Send { imm } => SendOp::Send { imm: imm_of(imm) },
            Op::SendInv { rkey } => SendOp::SendInv { rkey: Key(rkey) },
            Op::LocalInv { rkey } => SendOp::LocalInv { rkey: Key(rkey) },
            Op::SendTo { handle, qpn, qkey, imm } => {
                let handle = self.handles.get(handle).ok_or("no such address handle")?;
                SendOp::SendTo { to: handle.to(Qpn::new(qpn), qkey), imm: imm_of(imm) }
            }
            Op::Write { remote, rkey, imm } => {
                SendOp::Write { remote, rkey: Key(rkey), imm: imm_of(imm) }
            }
            Op::Read { remote, rkey } => SendOp::Read { remote, rkey: Key(rkey) },
            Op::CompareSwap { remote, rkey, compare, swap } => {
                SendOp::CompareSwap { remote, rkey: Key(rkey), compare, swap }
            }
            Op::FetchAdd { remote, rkey, add } => SendOp::FetchAdd { remote, rkey: Key(rkey), add },
            Op::Flush { remote, rkey, len, placement, region } => SendOp::Flush {
                remote,
                rkey: Key(rkey),
                len,
                placement: Placement::from_bits(placement).unwrap_or(Placement::GLOBAL),
                level: if region { FlushLevel::Region } else { FlushLevel::Range },
            },
            Op::AtomicWrite { remote, rkey } => SendOp::AtomicWrite { remote, rkey: Key(rkey) },
        })
    }

    pub(super) fn poll(&mut self, count: usize, timeout_ms: u64) -> Result<Vec<Completion>> {
        let deadline = Instant::now() + Duration::from_millis(timeout_ms);
        let mut found = Vec::new();
        while found.len() < count {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.opened()?.cq.wait_one(left) {
                Ok(wc) => {
                    self.last = if wc.src_qp.is_some() { Some(wc) } else { self.last };
                    found.push(completion(&wc));
                }
                Err(VerbsError::TimedOut) => break,
                Err(error) => return Err(error.to_string()),
            }
        }
        Ok(found)
    }

    pub(super) fn any_async_event(&self, timeout_ms: u64) -> Result<Option<String>> {
        let deadline = Instant::now() + Duration::from_millis(timeout_ms);
        loop {
            if let Some(event) = self.opened()?.ctx.poll_async_event() {
                return Ok(Some(event_name(&event)));
            }
            if Instant::now() > deadline {
                return Ok(None);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// The counters of a device; a device of the kernel shows them through its driver.
fn counters(ctx: &Context) -> String {
    let folder = format!("/sys/class/infiniband/{}/ports/1/hw_counters", ctx.name());
    let Ok(files) = std::fs::read_dir(folder) else {
        let all = format!("{:?}", ctx.counters());
        let counted = all.split(", ").filter(|word| !word.ends_with(": 0"));
        return counted.collect::<Vec<_>>().join(", ");
    };
    let read = |file: std::fs::DirEntry| {
        let value = std::fs::read_to_string(file.path()).ok()?;
        let value = value.trim();
        (value != "0").then(|| format!("{}: {value}", file.file_name().to_string_lossy()))
    };
    let mut all: Vec<String> = files.flatten().filter_map(read).collect();
    all.sort();
    all.join(", ")
}
