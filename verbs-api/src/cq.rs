//! Completion queues and the channels that announce their completions.

mod tasks;

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rocinante_kernel as kernel;
use rocinante_soft as soft;
use rocinante_soft::model::error::{Refused, VerbsError};
use rocinante_soft::model::wc::Wc;
use rocinante_stack::verbs::WcStatus;
use rustix::io::Errno;

use crate::device::Device;
use crate::tuning::waiting::{NAP, SPINS};

/// A completion queue (`ibv_create_cq(3)`). Cheap to clone. It lives until the last clone and the
/// last queue pair that uses it are gone.
#[derive(Debug, Clone)]
pub struct Cq {
    pub(crate) kind: CqKind,
}

#[derive(Debug, Clone)]
pub(crate) enum CqKind {
    Soft(Arc<soft::Cq>),
    Kernel(Arc<kernel::Cq>),
}

impl Cq {
    pub(crate) fn create(
        device: &Device,
        depth: u32,
        channel: Option<&CompChannel>,
    ) -> Result<Self, VerbsError> {
        device.limits().check_depth(depth)?;
        let kind = match (device, channel.map(|channel| &channel.kind)) {
            (Device::Soft(device), None) => CqKind::Soft(soft::Cq::create(device, depth, None)?),
            (Device::Soft(device), Some(ChannelKind::Soft(channel)))
                if Arc::ptr_eq(device, channel.device()) =>
            {
                CqKind::Soft(soft::Cq::create(device, depth, Some(channel))?)
            }
            (Device::Kernel(device), None) => {
                CqKind::Kernel(kernel::Cq::create(device, depth, None)?)
            }
            (Device::Kernel(device), Some(ChannelKind::Kernel(channel)))
                if Arc::ptr_eq(device, channel.device()) =>
            {
                CqKind::Kernel(kernel::Cq::create(device, depth, Some(channel))?)
            }
            (_, Some(_)) => {
                let why = "the completion channel belongs to another device";
                return Err(VerbsError::Invalid(why.into()));
            }
        };
        Ok(Self { kind })
    }

    /// Whether it belongs to `device`.
    pub(crate) fn is_of(&self, device: &Device) -> bool {
        match (&self.kind, device) {
            (CqKind::Soft(cq), Device::Soft(device)) => Arc::ptr_eq(device, cq.device()),
            (CqKind::Kernel(cq), Device::Kernel(device)) => Arc::ptr_eq(device, cq.device()),
            _ => false,
        }
    }

    /// Its number among the device's queues, by which asynchronous events name it.
    #[must_use]
    pub fn number(&self) -> u32 {
        match &self.kind {
            CqKind::Soft(cq) => cq.id().0,
            CqKind::Kernel(cq) => cq.number(),
        }
    }

    /// The number of completions that it has room for.
    #[must_use]
    pub fn depth(&self) -> usize {
        on!(CqKind, &self.kind, cq => cq.depth())
    }

    /// Gives it room for another number of completions (`ibv_resize_cq(3)`). Those that wait in it
    /// stay.
    ///
    /// # Errors
    /// [`VerbsError::Invalid`] for a depth out of range, and if more completions wait in it;
    /// [`VerbsError::Io`] (`EOPNOTSUPP`) for a queue of a kernel's device.
    pub fn resize(&self, depth: u32) -> Result<(), VerbsError> {
        match &self.kind {
            CqKind::Soft(cq) => {
                cq.device().limits.check_depth(depth)?;
                cq.resize(depth)
            }
            CqKind::Kernel(_) => {
                Err(std::io::Error::from_raw_os_error(Errno::OPNOTSUPP.raw_os_error()).into())
            }
        }
    }

    /// Takes up to `out.len()` completions, oldest first, and returns the part of `out` that holds
    /// them (`ibv_poll_cq(3)`). If there is none, the call first drives the device: it receives and
    /// sends packets on the caller's thread.
    ///
    /// ```
    /// use std::net::IpAddr;
    /// use rocinante::{Context, VerbsError, Wc};
    ///
    /// fn main() -> Result<(), VerbsError> {
    ///     let here = IpAddr::from([127, 0, 0, 1]);
    /// #   let (here, _) = rocinante::doc::addresses();
    ///     let cq = Context::open(here)?.create_cq(16)?;
    ///     let mut room = [Wc::default(); 16];
    ///     for wc in cq.poll(&mut room)? {
    ///         println!("{} {}", wc.wr_id, wc.status);
    ///     }
    ///     Ok(())
    /// }
    /// ```
    ///
    /// # Errors
    /// [`VerbsError::Busy`] once the queue has overflowed (`IBV_EVENT_CQ_ERR`): completions were
    /// lost, and the queue pairs that use it are in the error state. [`VerbsError::Io`] once the
    /// interface is gone (`IBV_EVENT_DEVICE_FATAL`). Completions still in the queue can be taken
    /// first. [`VerbsError::Hardware`] if the kernel's device cannot read its queue.
    #[inline]
    pub fn poll<'a>(&self, out: &'a mut [Wc]) -> Result<&'a [Wc], VerbsError> {
        let count = on!(CqKind, &self.kind, cq => cq.poll(out))?;
        let out = &mut out[..count];
        out.iter_mut().for_each(|wc| self.complement(wc));
        Ok(out)
    }

    /// Adds what only a failed completion tells.
    #[inline]
    fn complement(&self, wc: &mut Wc) {
        if wc.status != WcStatus::Success {
            wc.peer = on!(CqKind, &self.kind, cq => cq.device().peer_of(wc.qpn));
        }
    }

    /// Takes one completion, if there is one, as [`poll`](Self::poll).
    ///
    /// # Errors
    /// As [`poll`](Self::poll).
    #[inline]
    pub fn poll_one(&self) -> Result<Option<Wc>, VerbsError> {
        let mut found = on!(CqKind, &self.kind, cq => cq.poll_one())?;
        if let Some(wc) = &mut found {
            self.complement(wc);
        }
        Ok(found)
    }

    /// Polls until there is a completion: spins at first, then sleeps between polls.
    /// [`wait`](Self::wait) sleeps from the beginning.
    ///
    /// # Errors
    /// [`VerbsError::TimedOut`] after `timeout`; else as [`poll`](Self::poll).
    pub fn wait_one(&self, timeout: Duration) -> Result<Wc, VerbsError> {
        let deadline = Instant::now().checked_add(timeout);
        let mut spins = 0u32;
        loop {
            if let Some(wc) = self.poll_one()? {
                return Ok(wc);
            }
            spins = spins.saturating_add(1);
            if spins <= SPINS && !spins.is_multiple_of(64) {
                std::hint::spin_loop();
                continue;
            }
            let now = Instant::now();
            if deadline.is_some_and(|deadline| now >= deadline) {
                return Err(VerbsError::TimedOut);
            }
            match &self.kind {
                _ if spins <= SPINS => {}
                CqKind::Soft(cq) => {
                    let until = now + NAP;
                    cq.rest(deadline.map_or(until, |deadline| deadline.min(until)));
                }
                CqKind::Kernel(_) => std::thread::sleep(Duration::from_micros(50)),
            }
        }
    }

    /// Arms the queue: requests one event on the channel for the next completion
    /// (`ibv_req_notify_cq(3)`), or, if `solicited_only`, for the next solicited or failed one.
    /// Completions that are already there raise no event: poll until the queue is empty after
    /// arming, as the example of [`CompChannel`] does.
    ///
    /// # Errors
    /// [`VerbsError::Invalid`] if the queue has no channel; [`VerbsError::Hardware`] if the
    /// kernel's device refuses.
    pub fn req_notify(&self, solicited_only: bool) -> Result<(), VerbsError> {
        match &self.kind {
            CqKind::Soft(cq) if cq.has_channel() => {
                cq.req_notify(solicited_only);
                Ok(())
            }
            CqKind::Kernel(cq) if cq.has_channel() => cq.req_notify(solicited_only),
            CqKind::Soft(_) | CqKind::Kernel(_) => {
                Err(VerbsError::Invalid("the completion queue has no channel".into()))
            }
        }
    }

    /// Destroys the queue (`ibv_destroy_cq(3)`).
    ///
    /// # Errors
    /// [`VerbsError::Busy`], with the queue, while a queue pair or another clone uses it.
    pub fn destroy(self) -> Result<(), Refused<Self>> {
        let kind = match self.kind {
            CqKind::Soft(cq) => match Arc::try_unwrap(cq) {
                Ok(_) => return Ok(()),
                Err(cq) => CqKind::Soft(cq),
            },
            CqKind::Kernel(cq) => match Arc::try_unwrap(cq) {
                Ok(_) => return Ok(()),
                Err(cq) => CqKind::Kernel(cq),
            },
        };
        let why = VerbsError::Busy("a queue pair or another handle uses the completion queue");
        Err(Refused::new(Self { kind }, why))
    }
}

impl PartialEq for Cq {
    fn eq(&self, other: &Self) -> bool {
        match (&self.kind, &other.kind) {
            (CqKind::Soft(a), CqKind::Soft(b)) => Arc::ptr_eq(a, b),
            (CqKind::Kernel(a), CqKind::Kernel(b)) => Arc::ptr_eq(a, b),
            _ => false,
        }
    }
}

/// A completion event channel (`ibv_create_comp_channel(3)`). Its descriptor becomes readable when
/// a queue that [`Cq::req_notify`] armed completes something. One channel may serve several queues.
///
/// ```no_run
/// use std::net::IpAddr;
/// use rocinante::{Context, VerbsError};
///
/// fn serve(ctx: &Context) -> Result<(), VerbsError> {
///     let channel = ctx.create_comp_channel()?;
///     let cq = ctx.create_cq_with(16, &channel)?;
///     loop {
///         // Arm before the last look: what completes after it makes an event.
///         cq.req_notify(false)?;
///         while let Some(wc) = cq.poll_one()? {
///             println!("{} {}", wc.wr_id, wc.status);
///         }
///         // The queue that was armed; another one if the channel has several.
///         let _cq = channel.wait_event(None)?;
///     }
/// }
///
/// fn main() -> Result<(), VerbsError> {
///     serve(&Context::open(IpAddr::from([127, 0, 0, 1]))?)
/// }
/// ```
#[derive(Debug, Clone)]
pub struct CompChannel {
    kind: ChannelKind,
}

#[derive(Debug, Clone)]
enum ChannelKind {
    Soft(soft::Channel),
    Kernel(Arc<kernel::Channel>),
}

impl CompChannel {
    pub(crate) fn create(device: &Device) -> Result<Self, VerbsError> {
        let kind = match device {
            Device::Soft(device) => ChannelKind::Soft(soft::Channel::create(device)?),
            Device::Kernel(device) => ChannelKind::Kernel(kernel::Channel::create(device)?),
        };
        Ok(Self { kind })
    }

    /// The queue of the next event, if there is one now.
    #[must_use]
    pub fn try_event(&self) -> Option<Cq> {
        let kind = match &self.kind {
            ChannelKind::Soft(channel) => CqKind::Soft(channel.try_event()?),
            ChannelKind::Kernel(channel) => CqKind::Kernel(channel.try_event()?),
        };
        Some(Cq { kind })
    }

    /// Waits for the next event (`ibv_get_cq_event(3)`). It sleeps on the channel and, for a device
    /// in software, on the port as well; it drives that device on this thread. Events need no
    /// acknowledgement.
    ///
    /// # Errors
    /// [`VerbsError::TimedOut`] if there is none within `timeout`; `None` waits without limit.
    /// [`VerbsError::Io`] (`ENODEV`) once the kernel has removed its device, and the last event was
    /// taken.
    pub fn wait_event(&self, timeout: Option<Duration>) -> Result<Cq, VerbsError> {
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        loop {
            if let Some(cq) = self.try_event() {
                return Ok(cq);
            }
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return Err(VerbsError::TimedOut);
            }
            match &self.kind {
                ChannelKind::Soft(channel) => channel.wait(deadline),
                ChannelKind::Kernel(channel) => channel.wait(deadline)?,
            }
        }
    }
}

impl AsRawFd for CompChannel {
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}

impl AsFd for CompChannel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        on!(ChannelKind, &self.kind, channel => channel.fd())
    }
}
