//! Words, schedules and decisions.

use std::fs::OpenOptions;
use std::io::{ErrorKind, Read as _};
use std::net::IpAddr;
use std::os::unix::fs::OpenOptionsExt as _;
use std::time::Duration;

use serde_json::Value;

use super::link::Loss;
use super::log::FaultLog;
use super::{Decision, DeviceFaults, Faults, Plan, PortName, Seen, Side, Word};

const ACK: u8 = 0x11;

/// The numbers of the words that these tests use.
pub(super) fn names(kind: Word, word: &str) -> Vec<u8> {
    match (kind, word) {
        (Word::Opcode, "acknowledge") => vec![ACK],
        (Word::Opcode, "send") => vec![0, 1, 2],
        (Word::Verb, "reg_mr") => vec![1],
        (Word::Verb, "create_qp") => vec![2],
        (Word::Completion, "send") => vec![1],
        (Word::Completion, "recv") => vec![10, 11],
        (Word::Status, "RETRY_EXC_ERR") => vec![12],
        _ => Vec::new(),
    }
}

fn words(text: &str) -> Result<Plan, String> {
    Plan::of_words(text, names)
}

fn peer(last: u8) -> IpAddr {
    IpAddr::from([10, 0, 0, last])
}

/// A datagram of 100 bytes to a queue pair.
fn packet(opcode: u8, qp: u32, psn: u32) -> [u8; 100] {
    let mut bytes = [0; 100];
    bytes[0] = opcode;
    bytes[5..8].copy_from_slice(&qp.to_be_bytes()[1..]);
    bytes[9..12].copy_from_slice(&psn.to_be_bytes()[1..]);
    bytes
}

fn seen(payload: &[u8], side: Side) -> Seen<'_> {
    Seen { side, peer: peer(2), payload }
}

fn micros(us: u64) -> Duration {
    Duration::from_micros(us)
}

/// The decisions about `count` datagrams, one each microsecond.
fn decisions(faults: &mut Faults, side: Side, count: u64) -> Vec<Decision> {
    let decide = |n: u64| faults.decide(micros(n), &seen(&packet(4, 0x11, n as u32), side));
    (0..count).map(decide).collect()
}

fn port(last: u8, nth: usize) -> PortName {
    PortName { device: peer(last), nth }
}

fn faults(text: &str, seed: u64, nth: usize) -> Faults {
    Faults::new(&words(text).expect(text), seed, port(1, nth))
}

#[test]
fn each_rate_is_met_over_100_000_datagrams() {
    type Is<'a> = &'a dyn Fn(usize, &Decision) -> bool;
    let count = |text: &str, is: Is<'_>| {
        let all = decisions(&mut faults(text, 7, 0), Side::Ingress, 100_000);
        all.iter().enumerate().filter(|(n, decision)| is(*n, decision)).count()
    };
    let first = |decision: &Decision| *decision.copies().next().unwrap();
    let late = |n: usize, decision: &Decision| first(decision).due > micros(n as u64);
    let rates: [(&str, Is<'_>); 5] = [
        ("loss=2%", &|_, d| d.loss == Some(Loss::Chance)),
        ("dup=0.02", &|_, d| d.copies().count() == 2),
        ("corrupt=2e-2", &|_, d| first(d).flip.is_some_and(|bit| bit < 800)),
        ("ecn=2%", &|_, d| first(d).is_marked),
        ("reorder=2%", &|n, d| first(d).is_late && late(n, d)),
    ];
    for (text, is) in rates {
        // Six times the deviation of 100,000 draws.
        let hits = count(text, is);
        assert!((1735..=2265).contains(&hits), "{text}: {hits}");
        let off = text.split('=').next().unwrap().to_owned() + "=0,every=1000000";
        assert_eq!(count(&off, is), 0, "{off}");
    }
    assert_eq!(count("every=50", &|n, d| (d.loss == Some(Loss::Every)) != (n % 50 == 49)), 0);
    let bursts = |_: usize, decision: &Decision| decision.loss == Some(Loss::Burst);
    let hits = count("burst=0.5%,burst_length=7", &bursts);
    // A burst takes four on average, and none begins within one.
    assert!((1700..=2200).contains(&hits), "{hits}");
    let within = |n: usize, d: &Decision| {
        let delay = first(d).due - micros(n as u64);
        (micros(100)..=micros(150)).contains(&delay)
    };
    assert_eq!(count("delay=100us,jitter=50us", &within), 100_000);
    // A datagram of 100 bytes is 142 with its headers: at 8 bits in a microsecond it takes 142 µs
    // and 140 fit into the queue.
    let passed = count("rate=8Mbit,queue=20000", &|_, d| d.loss != Some(Loss::Rate));
    assert!((840..=850).contains(&passed), "{passed}");
}

#[test]
fn a_seed_repeats_its_decisions_and_ports_and_sides_differ() {
    let text = "loss=5%,dup=5%,reorder=5%,corrupt=5%";
    let all = |seed, nth, side| decisions(&mut faults(text, seed, nth), side, 10_000);
    let one = all(7, 0, Side::Egress);
    assert_eq!(one, all(7, 0, Side::Egress));
    for (other, what) in [
        (all(8, 0, Side::Egress), "seed"),
        (all(7, 1, Side::Egress), "port"),
        (all(7, 0, Side::Ingress), "side"),
        {
            let mut other = Faults::new(&words(text).unwrap(), 7, port(3, 0));
            (decisions(&mut other, Side::Egress, 10_000), "device")
        },
    ] {
        assert_ne!(one, other, "{what}");
    }
    // The datagrams of one side change nothing on the other.
    let mut both = faults(text, 7, 0);
    decisions(&mut both, Side::Ingress, 500);
    assert_eq!(decisions(&mut both, Side::Egress, 10_000), one);
}

/// The random part of a decision depends on the datagram's number alone.
#[test]
fn time_and_other_rules_draw_no_numbers_of_a_datagram() {
    let corrupted = |text: &str, from: u64| {
        let mut all = faults(text, 7, 0);
        let decide = |n: u64| {
            let bytes = packet(4, 0x11, n as u32);
            let decision = all.decide(micros(from + n), &seen(&bytes, Side::Egress));
            decision.copies().next().map(|fate| fate.flip)
        };
        (0..2000).map(decide).collect::<Vec<_>>()
    };
    let whole = corrupted("corrupt=30%", 0);
    let same = |other: &[Option<Option<usize>>], from: usize| {
        let pairs = whole.iter().zip(other).skip(from);
        let arrived = pairs.filter(|(_, other)| other.is_some());
        let (all, same) = arrived
            .fold((0, 0), |(all, same), (one, other)| (all + 1, same + usize::from(one == other)));
        assert_eq!(all, same);
        all
    };
    // It begins later in one run than in the other.
    assert_eq!(same(&corrupted("corrupt=30%,at=1ms", 0), 1000), 1000);
    assert_eq!(same(&corrupted("corrupt=30%,at=1ms", 500), 500), 1500);
    // A queue that is full at some times drops before anything else is drawn.
    let passed = same(&corrupted("corrupt=30%,rate=80Mbit,queue=1000", 0), 0);
    assert!((100..1900).contains(&passed), "{passed}");
    // Of the datagrams of one rule, another takes some.
    let mut all = faults("loss=50%;corrupt=30%", 7, 0);
    let mut first = faults("loss=50%", 7, 0);
    let lost = |faults: &mut Faults| {
        decisions(faults, Side::Egress, 2000).iter().map(|d| d.loss).collect::<Vec<_>>()
    };
    assert_eq!(lost(&mut all), lost(&mut first));
    let mut other = faults("every=2;corrupt=30%", 7, 0);
    let mut third = faults("every=3;corrupt=30%", 7, 0);
    let [other, third] = [&mut other, &mut third].map(|f| decisions(f, Side::Egress, 2000));
    let flips = |decision: &Decision| decision.copies().next().map(|fate| fate.flip);
    let both = other.iter().zip(&third).filter_map(|(one, two)| flips(one).zip(flips(two)));
    let both: Vec<_> = both.collect();
    assert!(both.len() > 600 && both.iter().all(|(one, two)| one == two), "{}", both.len());
}

/// A rule without the rules before it decides as it did.
#[test]
fn a_rule_draws_the_numbers_of_the_place_that_it_names() {
    let lost = |plan: &Plan| {
        let all = decisions(&mut Faults::new(plan, 7, port(1, 0)), Side::Egress, 1000);
        all.iter().map(|decision| decision.loss.is_some()).collect::<Vec<_>>()
    };
    let alone =
        |draws: &str| Plan::of_schedule(&format!("[[fault]]\nloss = 0.3\n{draws}"), names).unwrap();
    let both = lost(&words("loss=30%,qp=1;loss=30%").unwrap());
    assert_eq!(both, lost(&alone("draws = 1")));
    assert_ne!(both, lost(&alone("")));
    assert_eq!(lost(&alone("")), lost(&alone("draws = 0")));
    let failed = |plan: &Plan| {
        let mut device = DeviceFaults::new((plan, 7), peer(1), None).unwrap().unwrap();
        (0..1000).map(|_| device.call(micros(1), (1, "reg_mr")).is_some()).collect::<Vec<_>>()
    };
    let call = |draws: &str| {
        let text = format!("[[fault]]\nverb = \"reg_mr\"\nchance = 0.3\n{draws}");
        failed(&Plan::of_schedule(&text, names).unwrap())
    };
    let both = failed(&words("verb=create_qp,nth=1;verb=reg_mr,chance=30%").unwrap());
    assert_eq!(both, call("draws = 1"));
    assert_ne!(both, call(""));
}

#[test]
fn a_log_that_takes_no_more_says_how_many_lines_it_lost() {
    let folder = tempfile::TempDir::new().unwrap();
    let path = folder.path().join("pipe");
    assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
    let plan = words("loss=1%").unwrap();
    let open = || FaultLog::open(&path, &plan, 7, (peer(1), Some(3)));
    assert_eq!(open().unwrap_err().raw_os_error(), Some(libc::ENXIO), "no reader");
    let mut reader =
        OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(&path).unwrap();
    let mut read = || {
        let mut bytes = Vec::new();
        let error = reader.read_to_end(&mut bytes).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::WouldBlock);
        String::from_utf8(bytes).unwrap()
    };
    let mut log = open().unwrap();
    let add = |log: &mut FaultLog, nth: u64| {
        let bytes = packet(4, 1, 1);
        let decision = faults("partition", 1, 0).decide(micros(1), &seen(&bytes, Side::Egress));
        log.add(micros(nth), nth, &seen(&bytes, Side::Egress), &decision);
    };
    let mut text = String::new();
    for round in 0..2 {
        // More than a pipe takes, in writes that it may take in part.
        for nth in 1..=1000 {
            add(&mut log, round * 1001 + nth);
            if nth % 50 == 0 {
                log.write();
            }
        }
        text += &read();
        add(&mut log, round * 1001 + 1001);
        log.write();
        text += &read();
    }
    let lines: Vec<Option<Value>> =
        text.lines().map(|line| serde_json::from_str(line).ok()).collect();
    let torn = lines.iter().filter(|line| line.is_none()).count();
    let lines: Vec<Value> = lines.into_iter().flatten().collect();
    let lost: Vec<u64> = lines.iter().filter_map(|line| line["lost_lines"].as_u64()).collect();
    let whole = lines.iter().filter(|line| line.get("did").is_some()).count() as u64;
    // A full pipe still takes an end of a write that fits into its last page.
    assert!(torn >= 2 && lost.len() >= 2, "{torn}, {lost:?}");
    assert_eq!(whole + lost.iter().sum::<u64>(), 2002, "{lost:?}");
    assert_eq!(lines.last().unwrap()["datagram"], 2002);
    assert_eq!(lines[0]["faults"], "loss=1%");
    for line in &lines {
        let of = (line["pid"].as_u64(), line["address"].as_str(), line["port"].as_u64());
        assert_eq!(of, (Some(std::process::id().into()), Some("10.0.0.1"), Some(3)), "{line}");
    }
}

#[test]
fn a_rule_takes_only_its_datagrams() {
    let at = micros(1);
    let hits = |text: &str, opcode, qp, side, from| {
        let bytes = packet(opcode, qp, 0);
        let seen = Seen { peer: peer(from), ..seen(&bytes, side) };
        faults(text, 1, 0).decide(at, &seen).loss.is_some()
    };
    for (filter, taken) in [
        ("qp=0x11", [true, false, true, true, true]),
        ("opcode=acknowledge", [true, true, false, true, true]),
        ("opcode=17+send", [true, true, false, true, true]),
        ("side=egress", [true, true, true, false, true]),
        ("peer=10.0.0.2", [true, true, true, true, false]),
        ("peer=::ffff:10.0.0.2", [true, true, true, true, false]),
        ("side=egress,qp=17+18,peer=10.0.0.3+10.0.0.2", [true, true, true, false, true]),
    ] {
        let text = format!("partition,{filter}");
        let found = [
            hits(&text, ACK, 0x11, Side::Egress, 2),
            hits(&text, ACK, 0x12, Side::Egress, 2),
            hits(&text, 4, 0x11, Side::Egress, 2),
            hits(&text, ACK, 0x11, Side::Ingress, 2),
            hits(&text, ACK, 0x11, Side::Egress, 3),
        ];
        assert_eq!(found, taken, "{text}");
    }
    // Too short for a BTH: of no queue pair.
    let short = seen(&[ACK], Side::Egress);
    assert!(faults("partition,qp=0", 1, 0).decide(at, &short).loss.is_none());
    assert!(faults("partition,opcode=17", 1, 0).decide(at, &short).loss.is_some());
    // 128 bytes with the headers of IPv4 and UDP.
    for (mtu, loss) in [(127, Some(Loss::Mtu)), (128, None)] {
        let bytes = packet(4, 1, 1);
        let decision = faults(&format!("mtu={mtu}"), 1, 0).decide(at, &seen(&bytes, Side::Egress));
        assert_eq!(decision.loss, loss, "{mtu}");
    }
}

#[test]
fn a_rule_for_one_queue_pair_spares_another() {
    let mut faults = faults("loss=50%,qp=1", 3, 0);
    let mut lost = [0, 0];
    for n in 0..2000 {
        let qp = n % 2;
        let bytes = packet(4, qp, n);
        let loss = faults.decide(micros(1), &seen(&bytes, Side::Egress)).loss;
        lost[qp as usize] += u32::from(loss.is_some());
    }
    assert_eq!(lost[0], 0);
    assert!((400..600).contains(&lost[1]), "{lost:?}");
}

#[test]
fn several_faults_meet_one_datagram() {
    // Two copies of each of two copies; the second rule delays all, the third marks them.
    let text = "dup=100%,delay=1us;dup=100%,delay=2us;dup=100%,ecn=100%,corrupt=100%";
    let mut all = faults(text, 1, 0);
    let bytes = packet(4, 1, 1);
    let decision = all.decide(micros(5), &seen(&bytes, Side::Ingress));
    let copies: Vec<_> = decision.copies().collect();
    assert_eq!(copies.len(), super::COPIES);
    for copy in copies {
        assert!(copy.due == micros(8) && copy.is_marked && copy.flip.is_some(), "{copy:?}");
    }
    // An outgoing datagram is not marked: its path writes the header.
    let decision = all.decide(micros(5), &seen(&bytes, Side::Egress));
    assert!(decision.copies().all(|copy| !copy.is_marked));
    // The rule that lost it is named, and the next one sees nothing.
    let mut all = faults("delay=1us;loss=100%;every=1", 1, 0);
    let decision = all.decide(micros(5), &seen(&bytes, Side::Egress));
    assert_eq!((decision.rule, decision.loss), (Some(1), Some(Loss::Chance)));
    assert_eq!(decision.copies().count(), 0);
}

#[test]
fn a_rule_holds_from_its_beginning_to_its_end() {
    let cut_at = |faults: &mut Faults, ms: u64| {
        let bytes = packet(4, 1, 1);
        let now = Duration::from_millis(ms);
        faults.decide(now, &seen(&bytes, Side::Egress)).loss.is_some()
    };
    let mut all = faults("partition,at=1s,for=200ms", 1, 0);
    let found = [0, 999, 1000, 1199, 1200, 5000].map(|ms| cut_at(&mut all, ms));
    assert_eq!(found, [false, false, true, true, false, false]);
    let schedule = r#"
        seed = 9
        [[fault]]
        name = "third"
        partition = true
        [[fault]]
        at = "1s"
        for = "0.2s"
        loss = 1.0
        then = "second"
        [[fault]]
        name = "second"
        for = "100ms"
        delay = "1ms"
        then = "third"
    "#;
    let plan = Plan::of_schedule(schedule, names).unwrap();
    assert_eq!(plan.seed, Some(9));
    let mut all = Faults::new(&plan, 9, port(1, 0));
    let found = [0, 999, 1000, 1199, 1200, 1299, 1300, 9000].map(|ms| cut_at(&mut all, ms));
    assert_eq!(found, [false, false, true, true, false, false, true, true]);
}

#[test]
fn words_and_schedules_say_the_same() {
    let text = "loss=2%,dup=0.1%,qp=17+18,rate=10Gbit,queue=64K,peer=::1,ecn=1;delay=100us,seed=7";
    let table = r#"
        seed = 7
        [[fault]]
        loss = 0.02
        dup = "0.1%"
        qp = [17, "0x12"]
        rate = "10Gbit/s"
        queue = "64KiB"
        peer = "::1"
        ecn = 1
        [[fault]]
        delay = "0.1ms"
    "#;
    let (one, other) = (words(text).unwrap(), Plan::of_schedule(table, names).unwrap());
    assert_eq!((one.seed, &one.rules), (other.seed, &other.rules));
    assert_eq!(one.to_string(), text);
    for off in ["", "off", " off "] {
        assert!(words(off).unwrap().is_harmless(), "{off:?}");
    }
    for harmless in ["loss=0,delay=0", "burst=0,burst_length=5", "reorder_by=5us,reorder=0"] {
        assert!(words(harmless).unwrap().is_harmless(), "{harmless}");
    }
    assert!(!words("corrupt=1e-6").unwrap().is_harmless());
}

#[test]
fn the_order_of_words_does_not_matter() {
    for (text, [most, late, queue]) in [
        ("burst_length=4,burst=1%,reorder_by=0,reorder=1%,queue=5,rate=1bit", [4, 0, 5]),
        ("burst=1%,reorder=1%,rate=1bit", [16, 100, 1 << 20]),
    ] {
        let config = |text: &str| words(text).unwrap().rules.remove(0).config;
        let backwards = text.split(',').rev().collect::<Vec<_>>().join(",");
        let found = config(text);
        assert_eq!(found, config(&backwards), "{text}");
        let rate = found.rate.unwrap();
        assert_eq!([found.burst_max, rate.queue_bytes], [most, queue], "{text}");
        assert_eq!(found.reorder_delay, micros(late.into()), "{text}");
    }
}

#[test]
fn no_bit_changes_that_the_icrc_does_not_cover() {
    for (text, bytes) in [("corrupt=1", 100), ("corrupt=1", 6)] {
        let mut all = faults(text, 1, 0);
        let mut flips = [0; 800];
        for n in 0..20_000 {
            let payload = &packet(4, 1, n)[..bytes];
            let decision = all.decide(micros(1), &seen(payload, Side::Egress));
            flips[decision.copies().next().unwrap().flip.unwrap()] += 1;
        }
        for (bit, flips) in flips[..bytes * 8].iter().enumerate() {
            assert_eq!(*flips == 0, bit / 8 == 4, "{bytes} bytes, bit {bit}");
        }
    }
    // Of a shorter one no receiver looks at the ICRC.
    let decision = faults("corrupt=1", 1, 0).decide(micros(1), &seen(&[0; 5], Side::Egress));
    assert!(decision.copies().next().unwrap().flip.unwrap() < 40);
}

#[test]
fn a_schedule_is_a_file_with_an_end() {
    let folder = tempfile::TempDir::new().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    std::os::unix::fs::symlink("/dev/zero", path("zero.toml")).unwrap();
    let made = std::process::Command::new("mkfifo").arg(path("pipe.toml")).status().unwrap();
    assert!(made.success());
    std::fs::write(path("long.toml"), "\n".repeat(super::SCHEDULE_MAX as usize + 1)).unwrap();
    std::fs::write(path("bytes.toml"), [0xff]).unwrap();
    std::fs::create_dir(path("two\nlines.toml")).unwrap();
    for (name, says) in [
        ("zero.toml", "it is no file"),
        ("pipe.toml", "it is no file"),
        ("two\nlines.toml", "it is no file"),
        ("long.toml", "more than 1048576 bytes"),
        ("bytes.toml", "UTF-8"),
    ] {
        let error = Plan::read(&path(name), names).unwrap_err();
        assert!(error.contains(says) && !error.contains('\n'), "{name}: {error}");
    }
    let text = "[[fault]]\nloss = 0.5";
    let longest = text.to_owned() + &"\n".repeat(super::SCHEDULE_MAX as usize - text.len());
    std::fs::write(path("longest.toml"), longest).unwrap();
    let plan = Plan::read(&path("longest.toml"), names).unwrap();
    assert_eq!(plan.to_string(), path("longest.toml"));
}

#[test]
fn each_mistake_has_its_line() {
    let endless = "loss=1%;".repeat(65) + "dup=1%";
    for (text, says) in [
        ("loss=-2%", "a chance from 0 to 100%"),
        ("loss=101%", "a chance from 0 to 100%"),
        ("dup=1.01", "a chance from 0 to 100%"),
        ("loss=NaN", "a chance from 0 to 100%"),
        ("loss", "a chance from 0 to 100%"),
        ("corrupt=1e-7", "the least chance is 1e-6"),
        ("delay=100", "a time with its unit"),
        ("delay=-1us", "a time with its unit"),
        ("delay=1e9s", "a time with its unit"),
        ("delay=9999999999s", "longer than ten days"),
        ("partition,for=0", "a time longer than none"),
        ("partition=200ms", "how long it lasts is `for`"),
        ("every=0", "a whole number from 1 up"),
        ("mtu=70000", "a whole number from 1 up"),
        ("rate=10", "a rate from 1 bit"),
        ("rate=infGbit", "a rate from 1 bit"),
        ("rate=1Gbit,queue=0", "bytes, from 1"),
        ("queue=1M,loss=1%", "queue belongs to rate"),
        ("burst_length=5,loss=1%", "burst_length belongs to burst"),
        ("loss=1%,side=left", "egress, ingress or both"),
        ("loss=1%,peer=somewhere", "addresses"),
        ("loss=1%,qp=0x1000000", "numbers of queue pairs"),
        ("loss=1%,opcode=256", "opcodes, such as"),
        ("loss=1%,opcode=sond", "opcodes, such as"),
        ("ecn=1%,side=egress", "ecn marks datagrams that arrive"),
        ("loss=1%,loss=2%", "loss stands twice"),
        ("seed=1,loss=1%;dup=1%,seed=1", "seed stands twice"),
        ("seed=-1,loss=1%", "seed: a whole number"),
        ("los=1%", "\"los\" is no word of a fault"),
        ("loss=1%,", "\"\" is no word of a fault"),
        ("loss=1\n2,dup=1%", "loss=1 2: a chance"),
        ("at=1s", "at alone is no fault"),
        ("seed=7", "names no fault"),
        (&endless, "more than 64 rules"),
    ] {
        let error = words(text).expect_err(text);
        assert!(error.contains(says) && !error.contains('\n'), "{text}: {error}");
    }
    let table = |text: &str| Plan::of_schedule(text, names);
    for (text, says) in [
        ("", "missing field `fault`"),
        ("fault = []", "there is no [[fault]]"),
        ("[[fault]]\nloss = \"2%", "line 2"),
        ("sead = 1\n[[fault]]\nloss = 0.1", "unknown field `sead`"),
        ("[[fault]]\nseed = 1\nloss = 0.1", "number 1: seed stands before"),
        ("[[fault]]\nloss = 0.1\n[[fault]]\nloss = -0.1", "number 2: loss=-0.1: a chance"),
        ("[[fault]]", "a rule needs a fault"),
        ("[[fault]]\nloss = 0.1\ndraws = 64", "draws: the place of a rule"),
        ("[[fault]]\nloss = 0.1\ndraws = \"1\"", "draws: the place of a rule"),
        ("[[fault]]\ndraws = 1", "a rule needs a fault"),
        ("[[fault]]\nloss = 2020-01-01", "loss: a number, a text"),
        ("[[fault]]\nloss = 0.1\nfor = \"1s\"\nthen = \"b\"", "no rule has that name"),
        ("[[fault]]\nname = 1\nloss = 0.1", "name: a name between quotes"),
        (
            "[[fault]]\nname = \"a\"\nloss = 0.1\n[[fault]]\nname = \"a\"\nloss = 0.1",
            "two rules have the name \"a\"",
        ),
        (
            "[[fault]]\nloss = 0.1\nthen = \"a\"\n[[fault]]\nname = \"a\"\nloss = 0.1",
            "has no `for`, and never ends",
        ),
        (
            "[[fault]]\nloss = 1\nfor = \"1s\"\nthen = \"a\"\n\
             [[fault]]\nname = \"a\"\nat = \"1s\"\nloss = 1",
            "\"a\" begins twice",
        ),
        (
            "[[fault]]\nname = \"a\"\nloss = 1\nfor = \"1s\"\nthen = \"a\"",
            "after \"a\" lead back to it",
        ),
        (
            "[[fault]]\nname = \"a\"\nloss = 1\nfor = \"1s\"\nthen = \"b\"\n\
             [[fault]]\nname = \"b\"\nloss = 1\nfor = \"1s\"\nthen = \"a\"",
            "in a circle",
        ),
    ] {
        let error = table(text).expect_err(text);
        assert!(error.contains(says) && !error.contains('\n'), "{text}: {error}");
    }
    let error = Plan::read("/nowhere/faults.toml", names).unwrap_err();
    assert!(error.contains("the schedule /nowhere/faults.toml: No such file"), "{error}");
}
