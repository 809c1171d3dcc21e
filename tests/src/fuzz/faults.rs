//! Words and schedules of faults. Each has a plan, or an error of one line.

use rocinante_netdev::fault::Plan;

use super::Input;

pub(super) fn run(data: &[u8]) {
    let mut input = Input(data);
    let is_schedule = input.u8() % 2 == 1;
    let Ok(text) = std::str::from_utf8(input.0) else { return };
    let opcodes = |word: &str| if word == "send" { vec![4] } else { Vec::new() };
    let plan =
        if is_schedule { Plan::of_schedule(text, opcodes) } else { Plan::of_words(text, opcodes) };
    match plan {
        // A plan is read again from its own words, as the same.
        Ok(plan) if !is_schedule => {
            assert_eq!(Plan::of_words(&plan.to_string(), opcodes), Ok(plan));
        }
        Ok(plan) => assert_eq!(Plan::of_schedule(text, opcodes), Ok(plan)),
        Err(why) => assert!(!why.is_empty() && !why.contains(char::is_control), "{why:?}"),
    }
}

pub(super) fn corpus() -> Vec<Vec<u8>> {
    let words = [
        "loss=2%,reorder=1%,delay=100us,dup=0.1%,corrupt=1e-6,seed=7",
        "burst=1%,burst_length=8,every=100;rate=10Gbit,queue=64K;ecn=5%,side=ingress",
        "partition,at=1s,for=200ms,peer=10.0.0.2+::1,qp=17+0x12,opcode=send+0x11;mtu=1500",
        "off",
    ];
    let schedules = [
        "seed = 7\n[[fault]]\nat = \"1s\"\nfor = \"200ms\"\nloss = 0.02\nthen = \"b\"\n\
         [[fault]]\nname = \"b\"\npartition = true\nqp = [1, \"0x2\"]\n",
        "[[fault]]\nname = \"a\"\nfor = \"1s\"\nloss = 1\nthen = \"a\"\n",
    ];
    let with = |kind: u8, text: &str| [&[kind], text.as_bytes()].concat();
    let words = words.into_iter().map(|text| with(0, text));
    words.chain(schedules.into_iter().map(|text| with(1, text))).collect()
}
