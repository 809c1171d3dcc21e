//! The words of peers over TCP.

use super::proxy::reach;
use super::{Addresses, Case, Fault, Framing, PORT, Trial, Victim, call, left_nothing, serve};
use serde_json::{Value, json};
use std::io::Write;
use std::time::Duration;

/// The time that each program promises for one line or message.
const MESSAGE: Duration = Duration::from_secs(20);
/// At once, for a command in the debug profile.
const SOON: Duration = Duration::from_secs(5);

/// One side of an exchange.
struct Script {
    victim: Victim,
    command: &'static str,
    framing: Framing,
    /// For each message that the victim needs: the phase that its error names.
    phases: &'static [&'static str],
    /// The first of these messages. Before it, a server waits for another client.
    first: usize,
    /// The messages to replace by garbage. Messages that may have any content are left out.
    noise: &'static [usize],
}

const FIRST: &str = "first words: ";
const ENDS: &str = "exchange of endpoints: ";
const READY: &str = "meeting at \"ready\": ";
const TOLD: &str = "telling addresses";
const MEMORY: &str = "agreeing on memory and path MTU: ";

/// The messages of perftest's exchange for one queue pair: version, page, cache line, path MTU,
/// keys three times; then the meeting after the work, five numbers, and the meeting at the end.
const PERFTEST: Framing = Framing::Sizes(&[16, 4, 4, 2, 108, 108, 108, 108, 8, 8, 8, 8, 8, 108, 5]);

static SCRIPTS: [Script; 12] = [
    Script {
        victim: Victim::Client,
        command: "pingpong -n 20 -s 100",
        framing: Framing::Lines,
        phases: &[FIRST, ENDS, READY, ""],
        first: 0,
        noise: &[0, 1, 2, 3],
    },
    Script {
        victim: Victim::Server,
        command: "pingpong -e -n 20 -s 100",
        framing: Framing::Lines,
        phases: &["", ENDS, READY, ""],
        first: 1,
        noise: &[1, 2, 3],
    },
    Script {
        victim: Victim::Client,
        command: "perf write-bw -q 2 -n 20 -s 5000",
        framing: Framing::Lines,
        phases: &[FIRST, ENDS, READY, ""],
        first: 0,
        noise: &[0, 1, 2, 3],
    },
    Script {
        victim: Victim::Server,
        command: "perf write-bw -q 2 -n 20 -s 5000",
        framing: Framing::Lines,
        phases: &["", ENDS, READY, "meeting at \"finished\": "],
        first: 1,
        noise: &[1, 2, 3],
    },
    Script {
        victim: Victim::Client,
        command: "perf send-lat -n 20",
        framing: Framing::Lines,
        phases: &[FIRST, ENDS, READY, "", "", ""],
        first: 0,
        noise: &[0, 1, 2],
    },
    Script {
        victim: Victim::Server,
        command: "perf send-bw -b -n 20 -s 5000",
        framing: Framing::Lines,
        phases: &["", ENDS, READY, "", "telling results: "],
        first: 1,
        noise: &[1, 2, 3, 4],
    },
    Script {
        victim: Victim::Client,
        command: "pingpong --compat ibv -n 20",
        framing: Framing::Sizes(&[52]),
        phases: &[TOLD],
        first: 0,
        noise: &[0],
    },
    Script {
        victim: Victim::Server,
        command: "pingpong --compat ibv -n 20",
        framing: Framing::Sizes(&[52, 5]),
        phases: &[TOLD, TOLD],
        first: 0,
        noise: &[0, 1],
    },
    Script {
        victim: Victim::Client,
        command: "pingpong --compat ibv-srq -q 2 -n 20",
        framing: Framing::Sizes(&[52; 256]),
        phases: &[TOLD, TOLD],
        first: 0,
        noise: &[0, 1],
    },
    Script {
        victim: Victim::Server,
        command: "pingpong --compat ibv-srq -q 2 -n 20",
        framing: Framing::Sizes(&[52; 256]),
        phases: &[TOLD, TOLD],
        first: 0,
        noise: &[0, 1],
    },
    Script {
        victim: Victim::Client,
        command: "perf write-bw --compat perftest -n 20 -s 5000",
        framing: PERFTEST,
        phases: &[
            "telling versions: ",
            MEMORY,
            MEMORY,
            MEMORY,
            TOLD,
            TOLD,
            TOLD,
            "telling results: ",
            "telling results: ",
            "telling results: ",
            "telling results: ",
            "telling results: ",
            "telling results: ",
            "closing: ",
        ],
        first: 0,
        noise: &[0, 1, 2, 3, 4, 5, 6, 7, 13],
    },
    Script {
        victim: Victim::Server,
        command: "perf write-bw --compat perftest -n 20 -s 5000",
        framing: PERFTEST,
        phases: &[
            "telling versions: ",
            MEMORY,
            MEMORY,
            MEMORY,
            TOLD,
            TOLD,
            TOLD,
            "measuring: ",
            "telling results: ",
            "telling results: ",
            "telling results: ",
            "telling results: ",
            "telling results: ",
            "closing: ",
        ],
        first: 0,
        noise: &[0, 1, 2, 3, 4, 5, 6, 7, 8, 13],
    },
];

impl Script {
    fn case(&self, at: usize, fault: Fault, word: &'static str, within: Duration) -> Case {
        let words = vec![self.phases.get(at).copied().unwrap_or_default(), word];
        let (victim, framing) = (self.victim, self.framing);
        Case { victim, commands: [self.command; 2], framing, at, fault, words, within }
    }

    fn all(&self) -> impl Iterator<Item = usize> {
        self.first..self.phases.len()
    }
}

fn name(case: &Case) -> String {
    let fault = match &case.fault {
        Fault::Words(words) => {
            format!("{:?}", String::from_utf8_lossy(&words[..words.len().min(60)]))
        }
        other => format!("{other:?}"),
    };
    format!("{:?} of {:?}, message {}, {fault}", case.victim, case.commands[0], case.at)
}

fn trials(cases: Vec<Case>) -> Vec<Trial> {
    cases.into_iter().map(|case| Trial::new(name(&case), move || case.run())).collect()
}

/// Peers that fall silent or drip.
pub(super) fn silences() -> Vec<Trial> {
    let mut cases = Vec::new();
    for script in &SCRIPTS {
        for at in script.all() {
            // One message of each kind is enough.
            if script.phases[..at].contains(&script.phases[at]) && !script.phases[at].is_empty() {
                continue;
            }
            cases.push(script.case(at, Fault::Silence, "within", MESSAGE));
        }
        if script.phases[script.first..].iter().any(|phase| [TOLD, ENDS].contains(phase)) {
            let at = script.phases.iter().position(|phase| [TOLD, ENDS].contains(phase)).unwrap();
            cases.push(script.case(at, Fault::Drip, "within", MESSAGE));
        }
    }
    let mut trials = trials(cases);
    trials.push(other_program(b""));
    trials.push(other_program(b"{\"rocinante\":1,\"command\":\"ping"));
    trials
}

/// Peers that close the connection or send nonsense.
pub(super) fn nonsense() -> Vec<Trial> {
    let mut cases = Vec::new();
    for script in &SCRIPTS {
        for at in script.all() {
            cases.push(script.case(at, Fault::Close, "closed the connection", SOON));
            if at % 2 == 1 {
                cases.push(script.case(at, Fault::Half, "closed the connection", SOON));
            }
        }
        for at in script.noise {
            cases.push(script.case(*at, Fault::Noise, "", SOON));
        }
        if matches!(script.framing, Framing::Lines) {
            let endless = Fault::Words(vec![b'x'; 5 << 20]);
            cases.push(script.case(1, endless, "longer than", SOON));
            let other = Fault::Words(b"SSH-2.0-OpenSSH_9.2\r\n".to_vec());
            cases.push(script.case(1, other, "", SOON));
        }
    }
    trials(cases)
}

/// A hello with something changed.
fn hello(text: &str, change: impl FnOnce(&mut Value)) -> String {
    let mut value: Value = serde_json::from_str(text).unwrap();
    change(&mut value);
    value.to_string() + "\n"
}

macro_rules! hello {
    ($word:literal, $($path:tt)+) => {
        ($word, Fault::Edit(|text| hello(text, |hello| hello$($path)+)))
    };
}

/// Hellos that contradict themselves.
pub(super) fn own_contradictions() -> Vec<Trial> {
    let edits = [
        hello!("version 7, not 1", ["rocinante"] = json!(7)),
        hello!("no number of a queue pair", ["endpoints"][0]["qpn"] = json!(0)),
        hello!("no number of a queue pair", ["endpoints"][0]["qpn"] = json!(1)),
        hello!("no number of a queue pair", ["endpoints"][0]["qpn"] = json!(0x0100_0002)),
        hello!("24 bits", ["endpoints"][0]["psn"] = json!(0x0100_0000)),
        hello!("no such path MTU: 0", ["endpoints"][0]["mtu"] = json!(0)),
        hello!("no such path MTU: 9", ["endpoints"][0]["mtu"] = json!(9)),
        hello!("no such path MTU: 999", ["endpoints"][0]["mtu"] = json!(999)),
        hello!("nobody's address", ["endpoints"][0]["address"] = json!("0.0.0.0")),
        hello!("nobody's address", ["endpoints"][0]["address"] = json!("::")),
        hello!("two families", ["endpoints"][0]["address"] = json!("fd00::1")),
        hello!("invalid", ["endpoints"][0]["address"] = json!("here")),
        hello!("queue pairs where", ["endpoints"] = json!([])),
        (
            "queue pairs where",
            Fault::Edit(|text| {
                hello(text, |hello| {
                    let all = hello["endpoints"].as_array_mut().unwrap();
                    all.resize(9, all[0].clone());
                })
            }),
        ),
        hello!("missing field", ["endpoints"][0] = json!({})),
    ];
    let regions = [
        hello!("no end", ["regions"][0]["address"] = json!(u64::MAX)),
        hello!("no end", ["regions"][0]["len"] = json!(u64::MAX)),
        hello!("another length", ["regions"][0]["len"] = json!(64)),
        hello!("regions where", ["regions"] = json!([])),
    ];
    let mut cases = Vec::new();
    // To a client of one program, and to a server of another.
    for script in [&SCRIPTS[0], &SCRIPTS[3]] {
        for (word, fault) in &edits {
            cases.push(script.case(1, fault.clone(), word, SOON));
        }
        for (word, fault) in regions.iter().filter(|_| script.command.starts_with("perf")) {
            cases.push(script.case(1, fault.clone(), word, SOON));
        }
    }
    let (word, key) = hello!("refused the access", ["regions"][0]["rkey"] = json!(0x1234_5678));
    cases.push(Case { words: vec!["measuring: ", word], ..SCRIPTS[2].case(1, key, word, SOON) });
    trials(cases)
}

/// Requests in the first line of a client.
pub(super) fn requests() -> Vec<Trial> {
    let changed: [(&str, Fault); 6] = [
        hello!("no messages of", ["options"]["size"] = json!(u32::MAX)),
        hello!("no messages of", ["options"]["iters"] = json!(0)),
        hello!("no path MTU of 999", ["options"]["mtu"] = json!(999)),
        hello!("not understood", ["options"]["size"] = json!("x")),
        hello!("version 7", ["rocinante"] = json!(7)),
        hello!("rocinante perf read-bw", ["command"] = json!("perf read-bw")),
    ];
    let mut cases = Vec::new();
    for (word, fault) in changed {
        let commands = ["pingpong", "pingpong -n 20 -s 100"];
        let (victim, framing, words) = (Victim::Server, Framing::Lines, vec![word]);
        cases.push(Case { victim, commands, framing, at: 0, fault, words, within: SOON });
    }
    trials(cases)
}

/// Replaces the text at a fixed place of a message.
macro_rules! at {
    ($word:literal, $place:literal, $text:literal) => {
        (
            $word,
            Fault::Edit(|text| {
                let mut text = text.to_owned();
                text.replace_range($place..$place + $text.len(), $text);
                text
            }),
        )
    };
}

/// Addresses and keys that contradict themselves.
pub(super) fn other_contradictions() -> Vec<Trial> {
    let address = [
        at!("no number of", 5, "000000"),
        at!("no number of", 5, "000001"),
        at!("is no address", 4, "1"),
        at!("is no address", 5, "-00011"),
        at!("is no address", 12, "0x1234"),
        at!("no GID", 19, "00000000000000000000000000000000"),
        at!("both IPv6", 19, "fd770000000000000000000000000002"),
        at!("link-local", 19, "fe800000000000000000000000000002"),
        at!("multicast", 19, "00000000000000000000ffffe0000001"),
        at!("no host's", 19, "00000000000000000000ffffffffffff"),
        at!("is no address", 51, "0"),
    ];
    let keys = [
        at!("no number of a queue pair", 10, "000000"),
        at!("no number of a queue pair", 10, "000001"),
        at!("is no address", 10, "1000000"),
        at!("is no address", 17, "1000000"),
        at!("no GID", 50, "00:00:00:00:00:00:00:00:00:00:00:00:00:00:00:00"),
        at!("both IPv6", 50, "fd:77:00:00:00:00:00:00:00:00:00:00:00:00:00:02"),
        at!("no end", 33, "ffffffffffffffff"),
        at!("is no address", 24, "-0000001"),
    ];
    let other = [
        (0, at!("no version", 0, "perf")),
        (0, at!("no version", 0, "nan\0")),
        (0, at!("version 4.00", 0, "4.00")),
        (3, at!("no code of a path MTU", 0, "0")),
        (3, at!("no code of a path MTU", 0, "9")),
    ];
    let mut cases = Vec::new();
    for script in SCRIPTS.iter().filter(|script| script.command.contains("--compat")) {
        if script.command.contains("ibv-srq") {
            // The same as ibv.
            continue;
        }
        if script.command.contains("ibv") {
            for (word, fault) in &address {
                cases.push(script.case(script.first, fault.clone(), word, SOON));
            }
            continue;
        }
        for (word, fault) in &keys {
            cases.push(script.case(4, fault.clone(), word, SOON));
        }
        for (at, (word, fault)) in &other {
            cases.push(script.case(*at, fault.clone(), word, SOON));
        }
        for (at, words, word) in
            [(1, [0xff; 4], "as no machine has"), (2, [0; 4], "as no machine has")]
        {
            cases.push(script.case(at, Fault::Words(words.to_vec()), word, SOON));
        }
    }
    let perftest = &SCRIPTS[10];
    let (word, key) = at!("refused the access", 24, "12345678");
    cases.push(Case { words: vec!["measuring: ", word], ..perftest.case(4, key, word, SOON) });
    // Different options at the two ends: this end receives the words for other options.
    let fewer = Case {
        commands: ["pingpong --compat ibv-srq -q 9", "pingpong --compat ibv-srq -q 2"],
        ..SCRIPTS[8].case(999, Fault::Silence, "queue pair 3", SOON)
    };
    cases.push(Case { words: vec![TOLD, "queue pair 3", "-q"], ..fewer });
    trials(cases)
}

/// A client that sends nothing, or sends slowly, is sent away; the next client is served.
fn other_program(words: &'static [u8]) -> Trial {
    let name = format!("another program that says {:?}", String::from_utf8_lossy(words));
    Trial::new(name, move || {
        let addresses = Addresses::new();
        let [own, there] = addresses.0;
        let server = serve("pingpong", own);
        let other = reach((own, PORT).into());
        let mut dripping = other.try_clone().unwrap();
        std::thread::spawn(move || {
            for byte in words.chunks(1) {
                if dripping.write_all(byte).is_err() {
                    return;
                }
                std::thread::sleep(Duration::from_secs(1));
            }
        });
        let client = call("pingpong -n 20 -s 100", there, own).finish();
        let server = server.finish();
        drop(other);
        if (server.status, client.status) != (0, 0) {
            return Err(format!("{}{}", server.err, client.err));
        }
        if !server.err.contains("is no client of rocinante") {
            return Err(server.err);
        }
        left_nothing(own)
    })
}
