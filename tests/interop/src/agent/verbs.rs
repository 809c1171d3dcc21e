//! Executes requests with Rocinante's API: on its own devices, and on the kernel's through the
//! system's libibverbs.

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
    About, Connection, Heard, Op, Peer, Range, Remote, Reply, Request, Send, Service,
};
use super::words::{access_of, completion, event_name, service, text};
use super::{Agent, CQ_DEPTH, ELEMENTS, INLINE, QUEUE_DEPTH, difference};

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
                let pd = self.opened()?.pd.clone();
                return self.allocate(&pd, *len, access_of(*access)?).map(Reply::Region);
            }
            Request::Rereg { region, access, len } => {
                return self.rereg(*region, *access, *len).map(Reply::Region);
            }
            Request::Window { mw_type } => self.allocate_window(*mw_type)?,
            Request::Bind { qp, wr_id, window, range, access } => {
                return self.bind(*qp, *wr_id, *window, range, *access).map(Reply::Region);
            }
            Request::FreeWindow { window } => self.free_window(*window)?,
            Request::ForeignRegion { len, access } => {
                let pd = self.opened()?.ctx.alloc_pd();
                return self.allocate(&pd, *len, access_of(*access)?).map(Reply::Region);
            }
            Request::Deregister { region } => {
                let region = self.regions.get_mut(*region).and_then(Option::take);
                region.ok_or(NO_REGION)?.deregister().map_err(|refused| text(refused.error))?;
            }
            Request::Put { region, offset, bytes } => {
                let range = Range { region: *region, offset: *offset, len: bytes.len() };
                self.region(&range)?.write(range.offset, bytes);
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
            Request::Srq { depth } => {
                let srq = self.opened()?.pd.create_srq(*depth, ELEMENTS).map_err(text)?;
                self.srqs.push(srq);
            }
            Request::ArmSrq { srq, limit } => self.srq(*srq)?.arm(*limit).map_err(text)?,
            Request::Bytes(range) => {
                return Ok(Reply::Bytes(self.region(range)?.to_vec(range.offset, range.len)));
            }
            Request::Qp { service, access, srq } => return self.create_qp(*service, *access, *srq),
            Request::Handle { address } => self.create_handle(*address)?,
            Request::HandleOfLast { grh } => self.create_handle_of_last(grh)?,
            Request::Attach { qp, group } => {
                // The group's socket must be in the container's namespace.
                let qp = self.qp(*qp)?;
                self.inside(|| qp.attach_mcast(*group))?.map_err(text)?;
            }
            Request::Detach { qp, group } => self.qp(*qp)?.detach_mcast(*group).map_err(text)?,
            Request::Prepare { qp, access } => {
                self.qp(*qp)?.modify(&ModifyAttr::init(access_of(*access)?)).map_err(text)?;
            }
            Request::Connect { qp, peer, how } => self.connect(*qp, peer, how)?,
            Request::Modify { qp, state } => {
                self.qp(*qp)?.modify(&ModifyAttr::state(*state)).map_err(text)?;
            }
            Request::Query { qp } => return Ok(Reply::State(self.qp(*qp)?.state())),
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
            Request::RecvShared { srq, first, list } => {
                for (wr_id, ranges) in (*first..).zip(list) {
                    let sges = self.elements(ranges)?;
                    let posted = self.srq(*srq)?.post_recv(&[RecvWr { wr_id, sges: &sges }]);
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
            Request::Drops => {
                let drops = self.opened()?.ctx.counters().drops;
                let drops = drops.iter().map(|(reason, count)| (reason.to_owned(), count));
                return Ok(Reply::Drops(drops.collect()));
            }
            Request::Heard => {
                let Counters { rcvd_pkts, duplicate_request, out_of_seq_request, .. } =
                    self.opened()?.ctx.counters().transport;
                let (duplicates, gaps) = (duplicate_request, out_of_seq_request);
                return Ok(Reply::Heard(Heard { packets: rcvd_pkts, duplicates, gaps }));
            }
            Request::Counters => return Ok(Reply::Counters(counters(&self.opened()?.ctx))),
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

    fn srq(&self, index: usize) -> Result<&Srq> {
        self.srqs.get(index).ok_or_else(|| format!("there is no shared receive queue {index}"))
    }

    fn region(&self, range: &Range) -> Result<&Mr> {
        let region = self.regions.get(range.region).and_then(Option::as_ref).ok_or(NO_REGION)?;
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
        self.address = Some(address);
        Ok(about)
    }

    fn allocate(&mut self, pd: &Pd, len: usize, access: Access) -> Result<Remote> {
        let region = pd.allocate(len, access).map_err(text)?;
        let remote = Remote { address: region.address(), rkey: region.rkey().0 };
        self.regions.push(Some(region));
        Ok(remote)
    }

    fn create_qp(&mut self, of: Service, access: u32, srq: Option<usize>) -> Result<Reply> {
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
        Ok(Reply::Qp { qpn })
    }

    fn create_handle(&mut self, address: IpAddr) -> Result<()> {
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

    fn create_handle_of_last(&mut self, grh: &Range) -> Result<()> {
        let last = self.last.ok_or("no datagram has come")?;
        let header: [u8; GRH_LEN] = self
            .region(grh)?
            .to_vec(grh.offset, GRH_LEN)
            .try_into()
            .map_err(|_| "not the bytes of a header")?;
        let pd = &self.opened()?.pd;
        self.handles.push(self.inside(|| pd.create_ah_from_wc(&last, &header))?.map_err(text)?);
        Ok(())
    }

    fn connect(&self, qp: usize, peer: &Peer, how: &Connection) -> Result<()> {
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

    fn poll(&mut self, count: usize, timeout_ms: u64) -> Result<Reply> {
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
