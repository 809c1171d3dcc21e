//! The process that outlives its peers.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use rocinante::cm::Listener;
use rocinante::device::Backend;
use rocinante::verbs::Mtu;
use rocinante_lab::{Lab, LabConfig, Match, Rule};
use rocinante_tests::alone::{Held, at_rest, resident_bytes};
use rocinante_tests::harness::{Family, Setup, Side, address};

use super::lane::{Tally, mix};
use super::party::{LANES, PATIENCE, Party};
use super::process::{Options, Process, Role};
use super::trouble;

const PEERS: usize = 2;
pub(super) const PORT: u16 = 7471;
/// Percent of the packets.
const LOST: f64 = 0.1;
/// How long a life lasts once all its lanes work, ms.
const LIFE: [u64; 2] = [1500, 4500];
/// Lives before the last one.
const LIVES_MIN: u64 = 2;
/// A life whose number is a multiple of this ends peacefully, by its own word.
const PEACEFUL: u64 = 4;
/// The most growth of the process once all is given back, in bytes. The engine keeps its reorder
/// buffer of 2,048 packets of 4 KiB. Each of the thousands of connections of ten minutes adds less
/// than a page or two.
const GROWTH_MAX: usize = 16 << 20;

/// The events of a run.
#[derive(Debug, Default)]
struct Story {
    tally: Tally,
    lives: u64,
    killed: u64,
    /// The longest times from a death to the last error, and to the first work of the next life.
    noticed: Duration,
    back: Duration,
}

/// Runs the whole soak for `time`.
pub(super) fn soak(backend: Backend, test: &str, time: Duration) {
    let seed = std::env::var("ROCINANTE_SOAK_SEED").map_or(1, |seed| seed.parse().unwrap());
    println!("soak {backend}: {} s, ROCINANTE_SOAK_SEED={seed}", time.as_secs());
    let containers = PEERS as u8 + 1;
    let lab = Lab::new(&LabConfig { containers, ..LabConfig::default() }).unwrap();
    // On the way from one peer single datagrams are lost, and from the others super-packets.
    lab.container(PEERS).set_udp_segmentation(false).unwrap();
    let setup = Setup::new(backend).mtu(Mtu::Mtu1024);
    let side = Side::open(lab.container(0).netns(), address(&lab, 0, Family::V4), &setup);
    let loses = lab.lose(&Match::roce(), LOST).unwrap();
    let (before, resident) = (Held::now(&[&side.ctx]), resident_bytes());
    assert_eq!(before.resources, [at_rest()]);
    let until = Instant::now() + time;
    let story = Mutex::new(Story::default());
    let changes = std::thread::scope(|scope| {
        let changes = scope.spawn(|| trouble::make(&lab, seed, || Instant::now() >= until));
        for number in 1..=PEERS {
            let (side, loses) = (&side, &loses);
            let ward = Ward { lab: &lab, side, loses, test, number, story: &story, until };
            scope.spawn(move || side.run(|| ward.watch(mix(seed + number as u64))));
        }
        changes.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    });
    let dropped = loses.counter().unwrap().packets;
    nothing_is_left(&[&side], &before);
    let grown = resident_bytes().saturating_sub(resident);
    let story = story.into_inner().unwrap();
    println!("{}", figures(backend, time, &story, &side, &changes, (dropped, resident, grown)));
    assert!(grown < GROWTH_MAX, "{grown} bytes more than before");
    assert!(dropped > 0 && story.killed > 0 && story.lives > story.killed, "{story:?}");
    let counters = side.ctx.counters();
    // Nothing damages packets, and both sides have receives for the other's messages.
    assert_eq!((counters.drops.malformed, counters.drops.icrc), (0, 0), "{counters:?}");
    assert_eq!(counters.transport.send_rnr_err, 0, "{counters:?}");
    let refused =
        counters.transport.remote_access_errors + counters.transport.remote_invalid_request;
    assert_eq!(refused, 0, "{counters:?}");
}

/// Numbers of ended connections are kept for a while, and DREQs to dead peers are repeated.
pub(super) fn nothing_is_left(sides: &[&Side], before: &Held) {
    let devices: Vec<_> = sides.iter().map(|side| &side.ctx).collect();
    before.is_again(&devices, 2 * PATIENCE);
}

fn figures(
    backend: Backend,
    time: Duration,
    story: &Story,
    side: &Side,
    changes: &BTreeMap<&str, u64>,
    (dropped, resident, grown): (u64, usize, usize),
) -> String {
    let Story { tally, lives, killed, noticed, back } = story;
    let counters = side.ctx.counters().transport;
    format!(
        "soak {backend}: {} s: {} operations and {} messages, {:.2} GB compared, {} cut off; {} connections in {lives} lives, {killed} of them killed; \
         {} changes of the network {changes:?}; {dropped} packets lost, {} sent again, {} ACK timeouts; longest silence {:.2} s, \
         a death noticed within {:.2} s, and made good within {:.2} s; {} KiB resident, {} more in the end",
        time.as_secs(),
        tally.requests,
        tally.received,
        tally.bytes as f64 / 1e9,
        tally.cut_off,
        lives * LANES as u64,
        changes.values().sum::<u64>(),
        counters.retransmitted_pkts,
        counters.local_ack_timeout_err,
        tally.silence.as_secs_f64(),
        noticed.as_secs_f64(),
        back.as_secs_f64(),
        resident >> 10,
        grown >> 10,
    )
}

/// Keeps one peer alive, one life after the other.
struct Ward<'a> {
    lab: &'a Lab,
    side: &'a Side,
    loses: &'a Rule,
    test: &'a str,
    /// The number of the peer and of its container.
    number: usize,
    story: &'a Mutex<Story>,
    until: Instant,
}

impl Ward<'_> {
    /// Runs one life after the other. The connections of a dead life end while the next one works.
    fn watch(&self, mut random: u64) {
        let at = SocketAddr::new(self.side.address, PORT + self.number as u16);
        let listener = Listener::bind(&self.side.ctx, at, 2 * LANES).unwrap();
        std::thread::scope(|scope| {
            let mut killed = None;
            for number in 1.. {
                random = mix(random);
                let life = (self.number as u64) << 32 | number;
                let role = self.role(at, life);
                let mut process = Process::start(self.lab.container(self.number), self.test, &role);
                let ready = || process.is_ready();
                let mut party = Party::accept(&self.side.ctx, &listener, &role, ready);
                self.tell(|story| {
                    story.lives += 1;
                    let back = killed.map(|killed: Instant| killed.elapsed());
                    story.back = story.back.max(back.unwrap_or_default());
                });
                let lasts = LIFE[0] + random % (LIFE[1] - LIFE[0]);
                let ends = Instant::now() + Duration::from_millis(lasts);
                // However slow the machine is, each run has several lives and a loss.
                let last = self.until <= ends
                    && number > LIVES_MIN
                    && self.loses.counter().unwrap().packets > 0;
                if last || number % PEACEFUL == 0 {
                    let mut said = false;
                    party.work(|| {
                        Instant::now() >= ends && {
                            if !std::mem::replace(&mut said, true) {
                                process.order("stop");
                            }
                            true
                        }
                    });
                    process.end(&party);
                    self.tell(|story| story.tally.add(&party.tally()));
                    killed = None;
                } else {
                    party.work_until(|| Instant::now() >= ends);
                    process.is_alive();
                    process.child.kill();
                    let now = Instant::now();
                    killed = Some(now);
                    scope.spawn(move || {
                        let noticed = party.die(now);
                        self.tell(|story| {
                            story.killed += 1;
                            story.noticed = story.noticed.max(noticed);
                            story.tally.add(&party.tally());
                        });
                    });
                }
                if last {
                    break;
                }
            }
        });
    }

    fn role(&self, survivor: SocketAddr, life: u64) -> Role {
        let own = SocketAddr::new(address(self.lab, self.number, Family::V4), survivor.port());
        Role { own, survivor, life, options: Options::Patient }
    }

    fn tell(&self, what: impl FnOnce(&mut Story)) {
        what(&mut self.story.lock().unwrap());
    }
}
