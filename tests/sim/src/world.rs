//! Hosts, connections and the network between them, and the loop over their events.

use std::collections::{BTreeMap, VecDeque};
use std::net::IpAddr;

use rocinante_stack::cm::CmConfig;
use rocinante_stack::types::Mtu;
use rocinante_stack::wire::PeerInfo;
use rocinante_stack::wire::icrc::Template;
use rocinante_stack::{Budget, Engine, EngineConfig, PeerKind};

use crate::check::Verdict;
use crate::features::Features;
use crate::gathered::Gathered;
use crate::memory::Ram;
use crate::model::{Connection, End, EndId, Letters, Phase, Receive, Stream};
use crate::network::{Agenda, Event, Faults, Network, Packet, Weather};
use crate::random::{Digest, Random};
use crate::receives::Shared;
use crate::scarce;
use crate::talk::{Call, CmUsers, SLOT, Step, Talk};
use crate::traffic::{address, template};

/// The counts of a run.
#[derive(Debug)]
pub(crate) struct Tally {
    pub(crate) steps: u64,
    pub(crate) packets: u64,
    pub(crate) ops: u64,
    pub(crate) completions: u64,
    pub(crate) calls: u64,
    pub(crate) released: u64,
    pub(crate) notifications: u64,
    pub(crate) faults: Faults,
    pub(crate) ended: BTreeMap<&'static str, u64>,
    pub(crate) digest: Digest,
}

/// A machine with one device.
#[derive(Debug)]
pub(crate) struct Host {
    /// `None` while it is down.
    pub(crate) engine: Option<Engine>,
    pub(crate) ram: Ram,
    pub(crate) addr: IpAddr,
    pub(crate) ends: Vec<EndId>,
    pub(crate) srqs: Vec<Shared>,
    pub(crate) config: EngineConfig,
    pub(crate) stalled: bool,
    /// Packets that arrived while it was stalled.
    pub(crate) inbox: VecDeque<Packet>,
    /// The time when it next sends.
    pub(crate) tx_at: Option<u64>,
    /// Datagrams that its engine took, and packets that its engine sent.
    pub(crate) taken: u64,
    pub(crate) sent: u64,
    pub(crate) next_id: u16,
    pub(crate) templates: Vec<Template>,
    pub(crate) gathered: Gathered,
    pub(crate) users: CmUsers,
    /// Until these times its port has no room, and its kernel refuses packets.
    pub(crate) blocked_until: u64,
    pub(crate) refusing_until: u64,
}

/// The stage of a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stage {
    /// Everything that can go wrong does.
    Storm,
    /// Nothing goes wrong any more, and all that was begun ends.
    Heal,
    /// All requests must succeed.
    Prove,
    /// Everything is destroyed.
    End,
}

/// One world, for one round.
#[derive(Debug)]
pub(crate) struct World<'a> {
    pub(crate) random: Random,
    pub(crate) has: Features,
    pub(crate) now: u64,
    pub(crate) stage: Stage,
    pub(crate) hosts: Vec<Host>,
    pub(crate) ends: Vec<End>,
    pub(crate) connections: Vec<Connection>,
    pub(crate) network: Network,
    pub(crate) agenda: Agenda,
    pub(crate) tally: &'a mut Tally,
    pub(crate) trace: bool,
    /// Requests to connection managers.
    pub(crate) calls: Vec<Call>,
    /// A second shard of the first host, with an engine of its own. The first shard has the
    /// connection manager.
    pub(crate) shard: Option<usize>,
    /// Until this time all programs sleep.
    pub(crate) asleep_until: u64,
    /// Events at the present time.
    busy: u32,
    /// Calls of engines, to check footprints after some of them.
    pub(crate) weighed: u64,
}

/// The UDP source port of all hosts.
pub(crate) const PORT: u16 = 0xc001;
/// Number of packets that may wait at a stalled host.
pub(crate) const INBOX: usize = 64;
/// By then everything has ended: eight timeouts of the longest, 17 ms each, and a margin.
/// Nanoseconds.
const PATIENCE: u64 = 1_000_000_000;
/// More events than this at one time are a fault.
const BUSY_MAX: u32 = 20_000;

impl<'a> World<'a> {
    pub(crate) fn new(seed: u64, has: Features, trace: bool, tally: &'a mut Tally) -> Self {
        let mut random = Random::new(seed);
        let hosts = random.range(2, 5);
        let connections = random.range(1, 7);
        let v6 = random.one_in(4);
        let weather = Weather::storm(&mut random).only(&has.faults);
        let crowd = has.scarcity.crowd;
        let connections = if crowd { scarce::crowd(hosts, &mut random) } else { connections };
        let network = Network::new(hosts as usize, !v6, weather);
        let mut world = Self {
            random,
            has,
            now: 1_000,
            stage: Stage::Storm,
            hosts: Vec::new(),
            ends: Vec::new(),
            connections: Vec::new(),
            network,
            agenda: Agenda::default(),
            tally,
            trace,
            calls: Vec::new(),
            shard: None,
            asleep_until: 0,
            busy: 0,
            weighed: 0,
        };
        world.furnish(hosts, connections, v6);
        world
    }

    fn furnish(&mut self, hosts: u64, connections: u64, v6: bool) {
        let mut addrs: Vec<IpAddr> = (0..hosts).map(|host| address(host, v6)).collect();
        self.pair_shards(&mut addrs);
        let mut ends_of: Vec<Vec<EndId>> = vec![Vec::new(); hosts as usize];
        for _ in 0..connections {
            let first = self.random.index(ends_of.len());
            let second = (first + 1 + self.random.index(ends_of.len() - 1)) % ends_of.len();
            for host in [first, second] {
                let index = ends_of[host].len();
                ends_of[host].push(self.ends.len());
                let end = self.end(host, index);
                self.ends.push(end);
            }
            let mut connection = self.connection();
            connection.managed &= [first, second].iter().all(|host| self.has_manager(*host));
            self.connections.push(connection);
        }
        self.same_numbers(&ends_of);
        let port_mtu = self.random.of(&Mtu::ALL);
        for (host, ends) in ends_of.into_iter().enumerate() {
            let datagrams = 1 << self.random.range(3, 9);
            // The size of a slot: a socket's memory, a chunk for a single frame, or a slot for a
            // super-packet.
            let each = self.random.clone().of(&[1_024, 8_704, 66_560]);
            // Shards of one host have a receive queue each.
            let own_budget = Budget { bytes: each * datagrams, datagrams };
            let config = EngineConfig {
                qpn_slot: if self.has_manager(host) { SLOT } else { SLOT + 1 },
                own_budget,
                own_queue: PeerKind::announced(own_budget, None).queue(),
                window_max: 1 << self.random.range(2, 10),
                advertise_credits: self.random.one_in(2),
                quantum: 1 << self.random.range(1, 7),
                reorder_packets_max: self.random.of(&[0, 2, 64, 2048]),
                split_writes: self.random.one_in(2),
                stable_packets: self.random.clone().of(&[4, 100, 1 << 20]),
                port_mtu,
                ..EngineConfig::default()
            };
            let config = self.configured(config);
            let srqs = self.shared_queues(&ends);
            let mut ram = Ram::new(ends.len() + srqs.len());
            self.random.fill(&mut ram.arena);
            let templates = addrs.iter().map(|to| template(addrs[host], *to)).collect();
            self.hosts.push(Host {
                engine: None,
                ram,
                addr: addrs[host],
                ends,
                srqs,
                config,
                stalled: false,
                inbox: VecDeque::new(),
                tx_at: None,
                taken: 0,
                sent: 0,
                next_id: 0,
                templates,
                gathered: Gathered::new(self.random.clone(), self.has.policies.runs),
                users: CmUsers::new(host, self.has.scarcity.crowd, &mut self.random),
                blocked_until: 0,
                refusing_until: 0,
            });
            self.agenda.at(self.now, Event::Restart(host));
            self.agenda.at(self.now + 1, Event::Turn(host));
        }
        for connection in 0..self.connections.len() {
            self.agenda.at(self.now, Event::Rejoin(connection));
        }
        for end in 0..self.ends.len() {
            self.agenda.at(self.now, Event::Work(end));
        }
        self.agenda.at(self.now + 100_000, Event::Mishap);
    }

    /// Starts a host, with nothing but its memory.
    pub(crate) fn start(&mut self, at: usize) -> Verdict {
        let key = [self.random.next(), self.random.next()];
        let (other, manages) = (self.random.one_in(3), self.has_manager(at));
        let own_budget = self.own_budget(at);
        let host = &mut self.hosts[at];
        host.config.own_budget = own_budget;
        if other && manages && host.users.boot > 0 && self.has.faults.takeover {
            // Another host has taken over the address.
            host.users.config.ca_guid += 1000;
            self.tally.faults.takeover += 1;
        }
        let mut engine = Engine::new(host.config);
        if manages {
            engine.start_cm(CmConfig { key, ..host.users.config });
        }
        if self.has.strangers {
            engine.probe_unknown_peers();
        }
        if manages && self.has.strangers {
            engine.start_recognition([key[1], key[0]], None, info(&host.config));
        }
        host.engine = Some(engine);
        host.users.boot += 1;
        (host.taken, host.sent) = (0, 0);
        self.share(at)
    }

    /// Makes shared receive queues for some of the ends of a host.
    fn shared_queues(&mut self, ends: &[EndId]) -> Vec<Shared> {
        let count = self.random.index(3);
        let count = if self.has.policies.shared_receives { count } else { 0 };
        let mut srqs = Vec::new();
        for at in 0..count {
            srqs.push(Shared::new(ends.len() + at, 1 + u32::from(self.random.one_in(2))));
        }
        for end in ends {
            if count > 0 && self.random.one_in(2) {
                self.ends[*end].srq = Some(self.random.index(count));
            }
        }
        srqs
    }

    /// Runs the round. `length` is the usual number of steps of the storm.
    pub(crate) fn run(&mut self, length: u64) -> Verdict {
        let until = self.tally.steps + self.storm_length(length);
        while self.tally.steps < until {
            self.step()?;
        }
        self.heal()?;
        self.wait("healing", |world| world.is_at_rest())?;
        self.prove();
        self.wait("the proof", |world| world.is_proven())?;
        for host in 0..self.hosts.len() {
            self.count(host)?;
        }
        self.stage = Stage::End;
        self.wait("the end", |world| world.all_is_released())?;
        for host in 0..self.hosts.len() {
            self.count(host)?;
            self.dissolve(host)?;
        }
        let alive = self.ends.len() as u64;
        *self.tally.ended.entry("alive").or_default() += alive;
        Ok(())
    }

    fn wait(&mut self, what: &str, done: impl Fn(&mut Self) -> bool) -> Verdict {
        let limit = self.now + PATIENCE;
        while !done(self) {
            for _ in 0..32 {
                self.step()?;
            }
            if self.now > limit {
                return Err(format!("{what} does not end: {}", self.stuck()));
            }
        }
        Ok(())
    }

    /// The work that has not ended.
    fn stuck(&self) -> String {
        let mut text = String::new();
        for (at, end) in self.ends.iter().enumerate() {
            let is_done = |stream: &Stream| {
                let all = stream.next();
                stream.outstanding() == 0 && stream.exec == all && all >= stream.proof
            };
            let is_done = end.stream(end.generation).is_some_and(is_done);
            if end.phase == Phase::Ready && is_done && end.letters.coming == 0 {
                continue;
            }
            let (outstanding, receives) = (end.outstanding(), end.receives.len());
            let engine = self.hosts[end.host].engine.as_ref();
            let state = engine.zip(end.qpn).and_then(|(engine, qpn)| engine.query_qp(qpn));
            let state = state.map_or("none".into(), |(state, ..)| state.to_string());
            let stream = end.stream(end.generation);
            let (exec, next) = stream.map_or((0, 0), |stream| (stream.exec, stream.next()));
            text += &format!(
                "end {at}: {:?} ({state}) in life {}, {outstanding} outstanding, {receives} receives, {exec} of {next} executed; ",
                end.phase, end.generation
            );
        }
        for (at, host) in self.hosts.iter().enumerate() {
            let open = |talk: &Talk| talk.step == Step::Established && !talk.is_over();
            for (conn, talk) in host.users.talks.iter().filter(|(_, talk)| !open(talk)) {
                text += &format!("host {at}: {conn:?}, {talk:?}; ");
            }
        }
        text
    }

    /// Handles the next event.
    fn step(&mut self) -> Verdict {
        let mut tx: Option<(u64, usize)> = None;
        let mut timer: Option<(u64, usize)> = None;
        for (at, host) in self.hosts.iter().enumerate().filter(|(_, host)| !host.stalled) {
            let Some(engine) = &host.engine else { continue };
            let earlier = |found: Option<(u64, usize)>, time: u64| {
                if found.is_some_and(|(best, _)| best <= time) { found } else { Some((time, at)) }
            };
            if let Some(time) = host.tx_at {
                tx = earlier(tx, time);
            }
            if let Some(time) = engine.poll_timeout() {
                timer = earlier(timer, time.0);
            }
        }
        let event = self.agenda.next();
        let times = [event, tx.map(|(time, _)| time), timer.map(|(time, _)| time)];
        let Some(next) = times.into_iter().flatten().min() else {
            return Err("nothing will ever happen again".into());
        };
        if next > self.now {
            self.now = next;
            self.busy = 0;
        }
        self.busy += 1;
        if self.busy > BUSY_MAX {
            return Err(format!("time stands still at {}", self.now));
        }
        if event == Some(next) {
            let Some(event) = self.agenda.pop() else { return Ok(()) };
            return self.happen(event);
        }
        match (tx, timer) {
            (Some((time, host)), _) if time == next => self.transmit(host),
            (_, Some((_, host))) => self.time_out(host),
            _ => Ok(()),
        }
    }

    fn happen(&mut self, event: Event) -> Verdict {
        match event {
            Event::Arrive(packet) => self.arrive(packet),
            Event::Work(end) => {
                let rests = match self.stage {
                    Stage::End => 1_000_000,
                    Stage::Heal if self.ends[end].outstanding() == 0 => 200_000,
                    _ => 20_000,
                };
                let pause = self.random.of(&[500, 3_000, rests]);
                let pause = if self.stage == Stage::End { rests } else { pause };
                let later = self.now + 1 + self.random.below(self.rest(pause));
                self.agenda.at(later.max(self.asleep_until), Event::Work(end));
                self.work(end)
            }
            Event::Turn(host) => self.turn(host),
            Event::Mishap => self.mishap(),
            Event::Rejoin(connection) => self.begin_again(connection),
            Event::Join(end, generation) => self.join(end, generation),
            Event::Restart(host) => self.restart(host),
            Event::Resume(host) => self.resume(host),
            Event::Undrain(end, generation) => self.undrain(end, generation),
        }
    }

    /// A host goes down: checks its counts.
    pub(crate) fn stop(&mut self, host: usize) -> Verdict {
        self.count(host)?;
        let host = &mut self.hosts[host];
        host.engine = None;
        host.stalled = false;
        host.inbox.clear();
        host.tx_at = None;
        host.ram.regions = Ram::new(host.ram.registered.len()).regions;
        host.ram.registered.fill([false; 5]);
        host.srqs.iter_mut().for_each(Shared::forget);
        host.users.crash();
        for end in &host.ends {
            self.ends[*end].taken = None;
            self.ends[*end].letters = Letters::default();
        }
        for end in host.ends.clone() {
            self.lose_panes(end);
        }
        Ok(())
    }

    /// Checks that the counters of a host's engine match the packets given to it and taken from it.
    fn count(&self, at: usize) -> Verdict {
        let host = &self.hosts[at];
        let Some(engine) = &host.engine else { return Ok(()) };
        let (counters, drops) = (engine.counters(), engine.drops());
        if counters.sent_pkts != host.sent {
            return Err(format!(
                "host {at} counts {} packets sent, not {}",
                counters.sent_pkts, host.sent
            ));
        }
        let seen = counters.rcvd_pkts
            + counters.rcvd_cnp
            + drops.malformed
            + drops.unknown_opcode
            + drops.version
            + drops.unknown_qpn
            + drops.pkey
            + drops.wrong_source
            + drops.icrc
            + drops.wrong_service;
        if seen != host.taken {
            return Err(format!("host {at} counts {seen} packets received, not {}", host.taken));
        }
        if counters.retransmitted_pkts > counters.sent_pkts {
            return Err(format!("host {at} repeated more than it sent"));
        }
        Ok(())
    }

    fn heal(&mut self) -> Verdict {
        self.stage = Stage::Heal;
        for host in &mut self.hosts {
            (host.refusing_until, host.blocked_until) = (0, 0);
            host.tx_at = host.tx_at.map(|_| self.now);
        }
        self.network.heal();
        for host in 0..self.hosts.len() {
            if self.hosts[host].engine.is_none() {
                self.agenda.at(self.now, Event::Restart(host));
            } else if self.hosts[host].stalled {
                self.resume(host)?;
            }
        }
        for end in &mut self.ends {
            end.starved_until = 0;
        }
        Ok(())
    }

    /// Whether all ends are connected, and nothing is in flight.
    fn is_at_rest(&mut self) -> bool {
        self.ends.iter().enumerate().all(|(at, end)| {
            end.phase == Phase::Ready
                && end.generation == self.connections[at / 2].generation
                && end.outstanding() == 0
                && !end.stopped
                && !end.draining
                && !end.receives.iter().chain(&end.taken).any(Receive::is_spoilt)
        }) && !self.hosts.iter().any(|host| host.srqs.iter().any(Shared::is_spoilt))
            && self.connections.iter().all(|connection| !connection.rejoining)
            && self.agenda.len() <= self.ends.len() + self.hosts.len() + 1
            && self.no_call_is_open()
    }

    fn prove(&mut self) {
        self.stage = Stage::Prove;
        for end in &mut self.ends {
            let Some(stream) = end.current() else { continue };
            stream.proof = stream.next() + 12;
            // Messages that an unreliable connection has lost stay lost.
            stream.exec = stream.next();
            stream.exec_bytes = 0;
            end.letters.coming = 0;
        }
    }

    /// Whether all that had to succeed has succeeded.
    fn is_proven(&mut self) -> bool {
        self.ends.iter_mut().all(|end| {
            let Some(stream) = end.current() else { return false };
            let all = stream.next();
            let done = all >= stream.proof && stream.popped == all && stream.frontier() == all;
            done && end.letters.coming == 0
        }) && self.calls_are_proven()
    }

    /// Whether a peer may have been silent for too long.
    pub(crate) fn may_time_out(&self) -> bool {
        matches!(self.stage, Stage::Storm | Stage::Heal)
    }
}

/// A host's reply to probes: the numbers of its second shard, if it has one, are not among those.
fn info(config: &EngineConfig) -> PeerInfo {
    PeerInfo {
        bytes: config.own_budget.bytes,
        datagrams: config.own_budget.datagrams,
        queue: config.own_queue,
        slots: SLOT + 1,
        packet_ns: 250,
        kib_ns: 150,
    }
}
