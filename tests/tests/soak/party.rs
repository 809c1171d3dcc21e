//! The lanes between one side and one life of a peer, and how the two processes find each other.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use rocinante::cm::{Connecting, Listener, Params};
use rocinante::verbs::Qpn;
use rocinante::{Context, Cq, Pd, RemoteSlice, VerbsError, Wc};
use rocinante_tests::running::retried;

use super::lane::{Lane, Source, Tally, Unconnected, completions};
use super::process::{Options, Role};

/// Queue pairs between the survivor and each peer.
pub(super) const LANES: usize = 16;
/// How long nothing may complete, and how long anything may take, on a busy machine.
pub(super) const PATIENCE: Duration = Duration::from_secs(60);
/// The code of 1.07 s. Eight of them are longer than any trouble of the network.
pub(super) const TIMEOUT: u8 = 18;
pub(super) const RETRIES: u8 = 7;
/// The time in which a connection promises to end if its peer is silent: each timeout may take four
/// times as long (IBTA volume 1, 9.7.6.1.3 [M]).
pub(super) const PROMISE: Duration =
    Duration::from_nanos(4 * (4096 << TIMEOUT) * (RETRIES as u64 + 1));
/// How long to wait for a completion before the lanes look at their memory.
const LOOK: Duration = Duration::from_micros(500);

fn params(region: RemoteSlice, words: &[u64], options: Options) -> Params {
    let mut private = region.to_bytes().to_vec();
    private.extend(words.iter().flat_map(|word| word.to_le_bytes()));
    Params::default().options(options.connect()).private_data(&private)
}

/// A request for a lane (a pair of queue pairs): how often the peer's process was started before,
/// the lane, and the number of the attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Asker {
    life: u64,
    lane: u64,
    attempt: u64,
}

impl Asker {
    fn of(private: &[u8]) -> Option<(RemoteSlice, Self)> {
        let word = |nth: usize| {
            let bytes = private.get(20 + 8 * nth..)?.first_chunk()?;
            Some(u64::from_le_bytes(*bytes))
        };
        let asker = Self { life: word(0)?, lane: word(1)?, attempt: word(2)? };
        Some((RemoteSlice::from_bytes(private)?, asker))
    }

    /// The labels of the survivor and of the peer on this lane.
    fn voices(self) -> [u64; 2] {
        let both = self.life << 16 | self.lane << 1;
        [both, both | 1]
    }
}

/// All lanes between two processes.
pub(super) struct Party {
    lanes: Vec<Lane>,
    by_qpn: HashMap<Qpn, usize>,
    source: Source,
    cq: Cq,
}

impl Party {
    fn new(mut lanes: Vec<Lane>, pd: &Pd, cq: Cq) -> Self {
        lanes.iter_mut().for_each(Lane::start);
        let by_qpn = lanes.iter().enumerate().map(|(at, lane)| (lane.qp().qpn(), at)).collect();
        Self { lanes, by_qpn, source: Source::new(pd), cq }
    }

    /// The peer's side: asks for each lane until it is connected, through all changes of the
    /// network. Returns also the number of attempts for each.
    pub(super) fn ask(ctx: &Context, role: &Role) -> (Self, Vec<u64>) {
        let Role { survivor, life, options, .. } = *role;
        let (pd, cq) = (ctx.alloc_pd(), ctx.create_cq(completions(LANES)).unwrap());
        let mut attempts = Vec::new();
        let lanes = (0..LANES as u64).map(|lane| {
            let mut asker = Asker { life, lane, attempt: 0 };
            let connected = retried(|| {
                asker.attempt += 1;
                ask_once(&pd, &cq, survivor, asker, options)
                    .map_err(|why| format!("lane {lane}: {why}"))
            });
            attempts.push(asker.attempt);
            connected
        });
        let lanes = lanes.collect();
        (Self::new(lanes, &pd, cq), attempts)
    }

    /// The survivor's side: accepts the requests of this life of a peer, until `ready` returns the
    /// number of attempts for each lane.
    pub(super) fn accept(
        ctx: &Context,
        listener: &Listener,
        role: &Role,
        mut ready: impl FnMut() -> Option<Vec<u64>>,
    ) -> Self {
        let (pd, cq) = (ctx.alloc_pd(), ctx.create_cq(completions(LANES)).unwrap());
        let life = role.life;
        let deadline = Instant::now() + PATIENCE;
        let mut lanes: HashMap<u64, (u64, Lane)> = HashMap::new();
        let mut attempts = None;
        let mut failures = Vec::new();
        loop {
            attempts = attempts.or_else(&mut ready);
            let has = |lane: u64, attempt: &u64| {
                lanes.get(&lane).is_some_and(|(accepted, _)| accepted == attempt)
            };
            if attempts.as_ref().is_some_and(|all| (0..).zip(all).all(|(at, it)| has(at, it))) {
                break;
            }
            assert!(
                Instant::now() < deadline,
                "life {life:#x}: {} lanes only, the peer has {attempts:?}, {failures:?}\n{:?}",
                lanes.len(),
                ctx.counters()
            );
            match accept_once(&pd, &cq, listener, role) {
                Ok(Some((asker, lane))) => {
                    lanes.insert(asker.lane, (asker.attempt, lane));
                }
                Ok(None) => {}
                Err(why) => failures.push(why.to_string()),
            }
        }
        let mut lanes: Vec<_> = lanes.into_iter().collect();
        lanes.sort_by_key(|(lane, _)| *lane);
        Self::new(lanes.into_iter().map(|(_, (_, lane))| lane).collect(), &pd, cq)
    }

    /// Works until `stop` returns `true`, then until both sides have sent and received all.
    pub(super) fn work(&mut self, mut stop: impl FnMut() -> bool) {
        let mut stopping = false;
        while !self.lanes.iter().all(Lane::is_over) {
            stopping |= stop();
            self.turn(stopping);
        }
    }

    /// Works until `stop` returns `true`, and stops there.
    pub(super) fn work_until(&mut self, mut stop: impl FnMut() -> bool) {
        while !stop() {
            self.turn(false);
        }
    }

    fn turn(&mut self, stopping: bool) {
        for lane in &mut self.lanes {
            lane.work(&self.source, stopping);
        }
        if !self.take() {
            for lane in self.lanes.iter().filter(|lane| !lane.is_over()) {
                assert!(lane.silent_for() < PATIENCE, "{lane}");
            }
        }
    }

    /// Takes completions, and waits a little for the first; returns whether there were any.
    fn take(&mut self) -> bool {
        let mut room = [Wc::default(); 64];
        let mut count = self.cq.poll(&mut room).expect("no overflow").len();
        if count == 0 {
            match self.cq.wait_one(LOOK) {
                Ok(wc) => (room[0], count) = (wc, 1),
                Err(VerbsError::TimedOut) => return false,
                Err(error) => panic!("{error}"),
            }
        }
        for wc in &room[..count] {
            self.lanes[self.by_qpn[&wc.qpn]].take(wc, &self.source);
        }
        true
    }

    /// The peer was killed: each lane ends by an error in the time that the connection promises.
    /// Returns how long the last one took.
    pub(super) fn die(&mut self, killed: Instant) -> Duration {
        loop {
            let lives = |lane: &mut Lane| !lane.die();
            // Each of them has a request outstanding.
            let left: Vec<_> =
                self.lanes.iter_mut().filter_map(|lane| lives(lane).then_some(&*lane)).collect();
            let Some(lane) = left.first() else { break };
            // With a margin for a busy machine.
            assert!(killed.elapsed() < PROMISE + PATIENCE / 2, "{lane}");
            self.take();
        }
        killed.elapsed()
    }

    /// Ends the connections.
    pub(super) fn disconnect(&self) {
        for lane in &self.lanes {
            lane.qp().disconnect().unwrap();
        }
    }

    pub(super) fn tally(&self) -> Tally {
        let mut all = Tally::default();
        self.lanes.iter().for_each(|lane| all.add(lane.tally()));
        all
    }
}

fn ask_once(
    pd: &Pd,
    cq: &Cq,
    survivor: SocketAddr,
    asker: Asker,
    options: Options,
) -> Result<Lane, VerbsError> {
    let (memory, qp) = Unconnected::new(pd, cq)?;
    let params = params(memory.region(), &[asker.life, asker.lane, asker.attempt], options);
    // The survivor may accept and have no path to us at this moment; then it cannot even answer.
    let connection = Connecting::start(qp, survivor, &params)?.wait(PATIENCE / 10)?;
    let remote = RemoteSlice::from_bytes(connection.private_data()).expect("a region");
    let [theirs, ours] = asker.voices();
    Ok(memory.connected(connection, remote, [ours, theirs]))
}

/// `None` if no request comes, or only one from an earlier life.
fn accept_once(
    pd: &Pd,
    cq: &Cq,
    listener: &Listener,
    role: &Role,
) -> Result<Option<(Asker, Lane)>, VerbsError> {
    let request = match listener.request(Some(Duration::from_millis(20))) {
        Ok(request) => request,
        Err(VerbsError::TimedOut) => return Ok(None),
        Err(error) => return Err(error),
    };
    let (remote, asker) = Asker::of(request.private_data()).expect("an asker's words");
    if asker.life != role.life {
        return Ok(None);
    }
    let (memory, qp) = Unconnected::new(pd, cq)?;
    let params = params(memory.region(), &[], role.options);
    let connection = request.accept(qp, &params)?.wait(PATIENCE)?;
    Ok(Some((asker, memory.connected(connection, remote, asker.voices()))))
}
