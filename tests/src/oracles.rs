//! Rules that every test's devices must keep. [`Harness`](crate::harness::Harness) checks them when
//! it is dropped, unless the test has failed already.
//!
//! A test's objects must be gone by then. Rust drops locals in reverse order, so a test makes the
//! harness first. A structure that holds a harness holds it in its last field.
//!
//! A test that breaks a rule says which and why, in its [`Setup`](crate::harness::Setup):
//! [`breaks`](crate::harness::Setup::breaks) if it always does (the harness checks that, too), or
//! [`may_break`](crate::harness::Setup::may_break) if it depends on the machine.

use std::fmt::Write as _;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rocinante::device::Backend;
use rocinante::stats::{DeviceCounters, Resources};
use rocinante::{CompChannel, Context};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::delay::Delay;
use crate::harness::{PATIENCE, Side};

/// A rule for the devices of a test.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Oracle {
    /// No packet is retransmitted and no tail probe is sent without a reason that a counter names:
    /// a packet that was lost or refused, a receive that was not posted, a thread that did not get
    /// the processor.
    Retransmissions,
    /// A device holds the same as when it was opened, not more.
    Resources,
    /// The background threads of an idle device sleep: within ten seconds there is a period of
    /// [`QUIET`] without a round.
    Idle,
    /// The kernel gives each datagram to the right shard, on `udp` and `packet`.
    Steering,
    /// A descriptor is readable if, and only if, something waits behind it: asynchronous events,
    /// and events of the channels that [`Side::channel`](crate::harness::Side::channel) makes.
    Descriptors,
}

/// A rule that a test breaks.
#[derive(Debug, Clone, Copy)]
pub struct Exception {
    /// The rule.
    pub oracle: Oracle,
    /// Whether the test breaks it every time, or only now and then.
    pub always: bool,
    /// The reason.
    pub why: &'static str,
}

/// For so long the background threads of an idle device must do nothing.
pub const QUIET: Duration = Duration::from_millis(15);
/// How long a background thread needs to notice that the program no longer calls the device.
const SETTLES: Duration = Duration::from_millis(3);
/// The [`QUIET`] period of an idle device must begin within this time.
const QUIET_WITHIN: Duration = Duration::from_secs(10);
/// How long a queue pair hears nothing before it probes (`PATIENCE_NS` of the engine): each probe
/// needs a wait of that length.
const SILENCE: Duration = Duration::from_millis(2);
/// Probes that may cross their answers: the background thread may be late to look at a polling
/// program.
const CROSSINGS: u64 = 4;

/// Channels with descriptors that the harness checks.
pub(crate) type Channels = Arc<Mutex<Vec<CompChannel>>>;

/// The devices of a test, and the resources that they held when they were opened.
#[derive(Debug)]
pub struct Oracles {
    devices: Vec<Device>,
    exceptions: Vec<Exception>,
    delay: Delay,
    /// The largest number of queue pairs seen on one device.
    queue_pairs: AtomicU64,
}

#[derive(Debug)]
struct Device {
    ctx: Context,
    channels: Channels,
    held: Resources,
}

impl Oracles {
    /// The rules for these devices, starting from their present state. Devices of the kernel are
    /// left out.
    pub(crate) fn new(sides: &[Side], exceptions: &[Exception]) -> Self {
        let device = |side: &Side| {
            let ctx = side.ctx.clone();
            let held = ctx.resources()?;
            Some(Device { ctx, channels: side.channels.clone(), held })
        };
        let devices = sides.iter().filter_map(device).collect();
        Self {
            devices,
            exceptions: exceptions.to_vec(),
            delay: Delay::now(),
            queue_pairs: AtomicU64::new(0),
        }
    }

    /// The rules for a device without a harness. Declare the value right after the device: then
    /// Rust drops it before the device.
    #[must_use]
    pub fn of(side: &Side) -> Self {
        Self::new(std::slice::from_ref(side), &[])
    }

    /// The test may break this rule: see [`Setup::may_break`](crate::harness::Setup::may_break).
    #[must_use]
    pub fn may_break(mut self, oracle: Oracle, why: &'static str) -> Self {
        self.exceptions.push(Exception { oracle, always: false, why });
        self
    }

    /// Checks all rules. Panics if the test breaks a rule, or keeps a rule that it says it always
    /// breaks.
    fn ask(&self) {
        let mut wrong = String::new();
        for (oracle, broken) in [
            (Oracle::Resources, self.resources()),
            (Oracle::Idle, self.idle()),
            (Oracle::Descriptors, self.descriptors()),
            (Oracle::Steering, self.steering()),
            (Oracle::Retransmissions, self.retransmissions()),
        ] {
            let text = match (broken, self.exception(oracle)) {
                (Some(what), None) => what,
                (None, Some(Exception { always: true, why, .. })) => {
                    format!("the test says that it breaks this, and it does not: {why}")
                }
                _ => continue,
            };
            let _ = writeln!(wrong, "{oracle:?}: {text}");
        }
        if !wrong.is_empty() {
            let counters: Vec<_> = self.devices.iter().map(Device::counters).collect();
            panic!("{wrong}{counters:#?}");
        }
    }

    fn exception(&self, oracle: Oracle) -> Option<&Exception> {
        self.exceptions.iter().find(|exception| exception.oracle == oracle)
    }

    /// Resources that a device holds now and did not hold at first. Connections end a moment later
    /// than their objects: wait for them.
    fn resources(&self) -> Option<String> {
        let expected = self.exception(Oracle::Resources).is_some();
        let deadline = Instant::now() + if expected { Duration::ZERO } else { PATIENCE };
        loop {
            let more = |device: &&Device| device.ctx.resources() != Some(device.held);
            let device = self.devices.iter().find(more)?;
            let (now, before) = (device.ctx.resources()?, device.held);
            // Objects vanish at once, connection numbers do not.
            let objects = |it: Resources| (it.qps, it.mrs, it.paths);
            if objects(now) != objects(before) && now.connections == 0 || Instant::now() >= deadline
            {
                return Some(format!("{} holds {now:?}, at first {before:?}", device.ctx.name()));
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// A device that is not idle.
    fn idle(&self) -> Option<String> {
        let contexts: Vec<_> = self.devices.iter().map(|device| &device.ctx).collect();
        becomes_idle(&contexts).err()
    }

    /// A descriptor that is readable with nothing behind it, or the reverse.
    fn descriptors(&self) -> Option<String> {
        self.devices.iter().find_map(|device| {
            let ctx = &device.ctx;
            let events = || ctx.poll_async_event().is_some();
            // A change of the port that was taken back is no event.
            if is_ready_within(&ctx.async_fd(), Duration::ZERO) {
                while events() {}
            }
            let events = agrees(ctx.async_fd(), events);
            let channels = device.channels.lock().unwrap_or_else(PoisonError::into_inner);
            let of = |channel: &CompChannel| agrees(channel, || channel.try_event().is_some());
            let channels = channels.iter().find_map(|channel| of(channel).err());
            let what = |what, lie| format!("{}'s {what}: {lie}", ctx.name());
            let events = events.err().map(|lie| what("asynchronous events", lie));
            events.or_else(|| channels.map(|lie| what("completion channel", lie)))
        })
    }

    /// Datagrams that the kernel gave to the wrong shard.
    fn steering(&self) -> Option<String> {
        let steers = |device: &&Device| device.ctx.backend() != Some(Backend::Xdp);
        self.devices.iter().filter(steers).find_map(|device| {
            let (handed_over, lost) = device.ctx.counters().handed_over;
            let what = || format!("{}: {handed_over} handed over, {lost} lost", device.ctx.name());
            ((handed_over, lost) != (0, 0)).then(what)
        })
    }

    /// Packets retransmitted or probes sent without a reason.
    fn retransmissions(&self) -> Option<String> {
        let counters: Vec<_> = self.devices.iter().map(Device::counters).collect();
        let lost = counters.iter().any(loses);
        // Datagrams that the guard sends while a neighbour is unresolved may be overtaken by later
        // ones.
        let overtaken: u64 = counters.iter().map(|counters| counters.port.tx_unresolved).sum();
        let delay = self.delay.passed();
        counters.iter().find_map(|counters| {
            let it = &counters.transport;
            let gaps = it.rcvd_seq_err + it.implied_nak_seq_err;
            let (timeouts, probes) = (it.local_ack_timeout_err, it.tail_probes);
            // A tail probe does not count as retransmitted, except to a peer with
            // `Budget::STANDARD`.
            if it.retransmitted_pkts > 0 && gaps + timeouts + it.rcvd_rnr_err == 0 {
                let what = "packets were sent again, and nothing asked for them";
                return Some(format!("{} {what}", it.retransmitted_pkts));
            }
            let events = gaps + timeouts + probes.saturating_sub(CROSSINGS);
            // A thread that does not run keeps all queue pairs waiting at once.
            let events = events.saturating_sub(overtaken).div_ceil(self.queue_pairs());
            let explained = lost || delay >= SILENCE * u32::try_from(events).unwrap_or(u32::MAX);
            (!explained).then(|| {
                format!(
                    "{gaps} gaps, {timeouts} timeouts and {probes} questions of {} queue pairs; nothing \
                     was lost, and threads waited for a processor for {delay:?} only",
                    self.queue_pairs()
                )
            })
        })
    }

    fn queue_pairs(&self) -> u64 {
        self.queue_pairs.load(Ordering::Relaxed).max(1)
    }

    /// Remembers the number of a device's queue pairs.
    pub(crate) fn count_queue_pairs(&self) {
        let of = |device: &Device| device.ctx.resources().map_or(0, |it| it.qps as u64);
        let most = self.devices.iter().map(of).max().unwrap_or(0);
        self.queue_pairs.fetch_max(most, Ordering::Relaxed);
    }
}

impl Device {
    fn counters(&self) -> DeviceCounters {
        self.ctx.counters()
    }
}

impl Drop for Oracles {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.ask();
        }
    }
}

/// Whether a counter names a packet that was lost.
fn loses(counters: &DeviceCounters) -> bool {
    let DeviceCounters { drops, port, refused, handed_over, .. } = counters;
    let dropped = drops.malformed
        + drops.unknown_opcode
        + drops.version
        + drops.unknown_qpn
        + drops.pkey
        + drops.wrong_source
        + drops.icrc;
    let port = port.rx_queue_drops + port.rx_malformed + port.tx_failed;
    dropped + port + refused.0 + handed_over.1 > 0
}

/// Waits until the background threads of these devices do nothing for [`QUIET`]. Error: they never
/// become idle; the text has the number of their rounds.
pub fn becomes_idle(devices: &[&Context]) -> Result<(), String> {
    let rounds = || devices.iter().map(|ctx| ctx.background_rounds()).collect::<Vec<_>>();
    std::thread::sleep(SETTLES);
    let (begin, first) = (Instant::now(), rounds());
    let mut before = first.clone();
    loop {
        std::thread::sleep(QUIET);
        let after = rounds();
        if after == before {
            return Ok(());
        }
        let elapsed = begin.elapsed();
        if elapsed > QUIET_WITHIN {
            return Err(format!(
                "rounds of background threads: {first:?}, {after:?} after {elapsed:?}"
            ));
        }
        before = after;
    }
}

/// Takes all that waits behind a descriptor, which must be readable as long as there is something.
fn agrees(fd: impl AsFd, mut take: impl FnMut() -> bool) -> Result<(), String> {
    loop {
        let ready = is_ready_within(&fd, Duration::ZERO);
        let waits = take();
        if ready != waits {
            return Err(format!("the descriptor is ready: {ready}; something waits: {waits}"));
        }
        if !waits {
            return Ok(());
        }
    }
}

/// Whether there is something to read in this time.
pub(crate) fn is_ready_within(fd: &impl AsFd, timeout: Duration) -> bool {
    let timeout = Timespec::try_from(timeout).expect("no longer than a century");
    poll(&mut [PollFd::new(fd, PollFlags::IN)], Some(&timeout)).expect("poll") == 1
}
