//! The words of peers over TCP.

use super::proxy::reach;
use super::{Addresses, Case, Fault, PORT, Trial, Victim, call, left_nothing, serve};
use serde_json::{Value, json};
use std::io::Write;
use std::time::Duration;

/// The time that each program promises for one line.
const MESSAGE: Duration = Duration::from_secs(20);
/// At once, for a command in the debug profile.
const SOON: Duration = Duration::from_secs(5);

/// One side of an exchange.
struct Script {
    victim: Victim,
    command: &'static str,
    /// For each message that the victim needs: the phase that its error names.
    phases: &'static [&'static str],
    /// The messages to replace by garbage. Messages that may have any content are left out. Before
    /// the first one, a server waits for another client.
    noise: &'static [usize],
}

const FIRST: &str = "first words: ";
const ENDS: &str = "exchange of endpoints: ";
const READY: &str = "meeting at \"ready\": ";

static SCRIPTS: [Script; 6] = [
    script(Victim::Client, "pingpong -n 20 -s 100", &[FIRST, ENDS, READY, ""], &[0, 1, 2, 3]),
    script(Victim::Server, "pingpong -e -n 20 -s 100", &["", ENDS, READY, ""], &[1, 2, 3]),
    script(
        Victim::Client,
        "perf write-bw -q 2 -n 20 -s 5000",
        &[FIRST, ENDS, READY, ""],
        &[0, 1, 2, 3],
    ),
    script(
        Victim::Server,
        "perf write-bw -q 2 -n 20 -s 5000",
        &["", ENDS, READY, "meeting at \"finished\": "],
        &[1, 2, 3],
    ),
    script(Victim::Client, "perf send-lat -n 20", &[FIRST, ENDS, READY, "", "", ""], &[0, 1, 2]),
    script(
        Victim::Server,
        "perf send-bw -b -n 20 -s 5000",
        &["", ENDS, READY, "", "telling results: "],
        &[1, 2, 3, 4],
    ),
];

const fn script(
    victim: Victim,
    command: &'static str,
    phases: &'static [&'static str],
    noise: &'static [usize],
) -> Script {
    Script { victim, command, phases, noise }
}

impl Script {
    fn case(&self, at: usize, fault: Fault, word: &'static str, within: Duration) -> Case {
        let words = vec![self.phases.get(at).copied().unwrap_or_default(), word];
        Case { victim: self.victim, commands: [self.command; 2], at, fault, words, within }
    }

    fn all(&self) -> impl Iterator<Item = usize> {
        self.noise[0]..self.phases.len()
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
        let at = script.phases.iter().position(|phase| *phase == ENDS).unwrap();
        cases.push(script.case(at, Fault::Drip, "within", MESSAGE));
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
        cases.push(script.case(1, Fault::Words(vec![b'x'; 5 << 20]), "longer than", SOON));
        cases.push(script.case(1, Fault::Words(b"SSH-2.0-OpenSSH_9.2\r\n".to_vec()), "", SOON));
    }
    trials(cases)
}

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
pub(super) fn contradictions() -> Vec<Trial> {
    let edits = [
        hello!("version 7, not 1", ["rocinante"] = json!(7)),
        hello!("no number of a queue pair", ["endpoints"][0]["qpn"] = json!(0)),
        hello!("no number of a queue pair", ["endpoints"][0]["qpn"] = json!(1)),
        hello!("no number of a queue pair", ["endpoints"][0]["qpn"] = json!(0x0100_0002)),
        hello!("24 bits", ["endpoints"][0]["psn"] = json!(0x0100_0000)),
        hello!("no such path MTU: 0", ["endpoints"][0]["mtu"] = json!(0)),
        hello!("no such path MTU: 9", ["endpoints"][0]["mtu"] = json!(9)),
        hello!("no such path MTU: 999", ["endpoints"][0]["mtu"] = json!(999)),
        hello!("no host's address", ["endpoints"][0]["address"] = json!("0.0.0.0")),
        hello!("no host's address", ["endpoints"][0]["address"] = json!("::")),
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
        let (victim, words) = (Victim::Server, vec![word]);
        cases.push(Case { victim, commands, at: 0, fault, words, within: SOON });
    }
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
