//! Words and schedules of faults. Each has a plan, or an error of one line.

use std::time::Duration;

use rocinante_netdev::fault::{DeviceFaults, Plan, Word};

use super::Input;

pub(super) fn run(data: &[u8]) {
    let mut input = Input(data);
    let is_schedule = input.u8() % 2 == 1;
    let Ok(text) = std::str::from_utf8(input.0) else { return };
    let plan =
        if is_schedule { Plan::of_schedule(text, names) } else { Plan::of_words(text, names) };
    match plan {
        // A plan is read again from its own words, as the same.
        Ok(plan) if !is_schedule => {
            decide(&plan);
            assert_eq!(Plan::of_words(&plan.to_string(), names), Ok(plan));
        }
        Ok(plan) => {
            decide(&plan);
            assert_eq!(Plan::of_schedule(text, names), Ok(plan));
        }
        Err(why) => assert!(!why.is_empty() && !why.contains(char::is_control), "{why:?}"),
    }
}

fn names(kind: Word, word: &str) -> Vec<u8> {
    match (kind, word) {
        (Word::Verb, "reg_mr") => vec![1],
        (Word::Status, "RETRY_EXC_ERR") => vec![12],
        (Word::Verb | Word::Status, _) => Vec::new(),
        (_, "send") => vec![4],
        (_, "recv") => vec![5, 6],
        _ => Vec::new(),
    }
}

/// A device with the plan decides, always alike.
fn decide(plan: &Plan) {
    let address = [10, 0, 0, 1].into();
    let decisions = || {
        let faults = DeviceFaults::new((plan, 7), address, None).expect("no log");
        faults.map(|mut faults| {
            let times = (0..64).map(Duration::from_millis);
            let all: Vec<_> = times
                .map(|now| {
                    let called = faults.call(now, (1, "reg_mr"));
                    let completed = faults.completion(now, (4, "SEND"), 17, |_| "FAILED");
                    (called, completed, faults.is_unready(now, address, &[4; 24]))
                })
                .collect();
            (faults.timeline(), all)
        })
    };
    let one = decisions();
    assert_eq!(one, decisions());
    assert!(one.is_none() || !plan.is_harmless());
}

pub(super) fn corpus() -> Vec<Vec<u8>> {
    let words = [
        "loss=2%,reorder=1%,delay=100us,dup=0.1%,corrupt=1e-6,seed=7",
        "burst=1%,burst_length=8,every=100;rate=10Gbit,queue=64K;ecn=5%,side=ingress",
        "partition,at=1s,for=200ms,peer=10.0.0.2+::1,qp=17+0x12,opcode=send+0x11;mtu=1500",
        "verb=reg_mr+reg_mr,nth=3,errno=ENOMEM;status=RETRY_EXC_ERR,wc=send+recv,chance=1%,qp=17",
        "rnr=50%,peer=10.0.0.1,at=1ms;event=CQ_ERR,nth=2;event=PORT_ERR,at=5ms,for=5ms",
        "stall,at=1s,for=1s;event=DEVICE_FATAL;event=GID_CHANGE,at=2ms;verb=reg_mr,errno=5",
        "off",
    ];
    let schedules = [
        "seed = 7\n[[fault]]\nat = \"1s\"\nfor = \"200ms\"\nloss = 0.02\ndraws = 3\nthen = \"b\"\n\
         [[fault]]\nname = \"b\"\npartition = true\nqp = [1, \"0x2\"]\n",
        "[[fault]]\nname = \"a\"\nfor = \"1s\"\nloss = 1\nthen = \"a\"\n",
    ];
    let with = |kind: u8, text: &str| [&[kind], text.as_bytes()].concat();
    let words = words.into_iter().map(|text| with(0, text));
    words.chain(schedules.into_iter().map(|text| with(1, text))).collect()
}
