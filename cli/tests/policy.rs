//! `rocinante policy-check`: the matrix with its rules and without them, and the document.

use std::process::{Command, Stdio};
use std::sync::Mutex;

use rocinante_cli::policy::table::{Action, BACKENDS, CONTROLS, Effect, Group, Mark};
use rocinante_lab::{
    Availability, Between, Hosts, Lab, LabConfig, Netns, Shaper, Tbf, UPLINK, VXLAN,
};
use serde_json::Value;

/// The matrix measures rates: one at a time.
static MACHINE: Mutex<()> = Mutex::new(());

/// The report of a check with these options, and its exit code. `None`, with a line that says why,
/// where no lab can be made.
fn check(test: &str, args: &[&str]) -> Option<(Value, Option<i32>)> {
    let _alone = MACHINE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let available = Availability::probe();
    if let Err(why) = available.lab.and(available.nft).and(available.tc) {
        eprintln!("SKIPPED policy::{test}: {why}");
        return None;
    }
    let mut command = Command::new(env!("CARGO_BIN_EXE_rocinante"));
    command.args(["policy-check", "--json"]).args(args).stdin(Stdio::null());
    let output = command.stderr(Stdio::inherit()).output().expect("the program starts");
    let text = String::from_utf8(output.stdout).expect("text");
    let report = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"));
    Some((report, output.status.code()))
}

#[test]
fn every_cell_is_as_documented() {
    let Some((report, code)) = check("every_cell_is_as_documented", &[]) else { return };
    let cells = report["cells"].as_array().expect("cells");
    // A machine with other work may not reach the rate. The shaper binds all the same.
    let is_slow = |cell: &&Value| {
        let rate = cell["figures"]["of_limit_in_all"].as_f64();
        let why = cell["why"].as_array().map_or(&[][..], Vec::as_slice);
        let of_rate = |why: &Value| why.to_string().contains("of the rate came through");
        cell["verdict"] == "differs"
            && rate.is_some_and(|rate| rate > 0.0 && rate <= 1.01)
            && why.iter().all(of_rate)
    };
    let slow = cells.iter().filter(is_slow).count();
    for cell in cells.iter().filter(|cell| !is_slow(cell)) {
        assert_ne!(cell["verdict"], "differs", "{cell:#}");
    }
    let status = Some(i32::from(slow > 0));
    assert_eq!((code, cells.len(), &report["total"]), (status, 138, &138.into()));
    let documented = cells.iter().filter(|cell| cell["verdict"] == "as-documented").count();
    assert_eq!(report["documented"], documented);
    assert!(documented >= 60, "only {documented} cells were tried");
}

/// Without its rule, a cell fails by the effect on its traffic, not only for want of a counter.
#[test]
fn without_its_rule_each_cell_fails() {
    let args = ["--without-rules"];
    let Some((report, code)) = check("without_its_rule_each_cell_fails", &args) else { return };
    assert_eq!((code, &report["documented"]), (Some(1), &0.into()));
    for cell in report["cells"].as_array().expect("cells") {
        if cell["verdict"] == "not-to-be-had" {
            continue;
        }
        let control = CONTROLS.iter().find(|control| cell["control"] == control.name);
        let control = control.expect("a control of the table");
        let why = cell["why"].to_string();
        let traffic = match control.action {
            _ if cell["expected"] == "bypassed" => "there is no",
            Action::Drop(_) => "the WRITE ended in SUCCESS",
            Action::Limit(_) => "of the rate came through",
            Action::Mark(Mark::Mtu) => "4096 ended in SUCCESS",
            Action::Mark(_) => "no packet had the mark",
        };
        assert!(why.contains(traffic), "{cell:#}");
    }
}

#[test]
fn the_options_choose_cells() {
    let args = ["--all", "--only", "bridge forward", "--netdev", "udp"];
    let Some((report, code)) = check("the_options_choose_cells", &args) else { return };
    assert_eq!((code, &report["total"]), (Some(0), &4.into()), "{report:#}");
    let of = |key: &str| -> Vec<String> {
        let cells = report["cells"].as_array().expect("cells");
        cells.iter().map(|cell| cell[key].as_str().expect("a word").to_owned()).collect()
    };
    assert_eq!(of("netdev"), ["udp"; 4]);
    assert_eq!(of("family"), ["ipv4", "ipv4", "ipv6", "ipv6"]);
    let Some((_, code)) = check("the_options_choose_cells", &["--only", "no such control"]) else {
        return;
    };
    assert_eq!(code, Some(1), "nothing was tried");
}

/// The table of the document is the one of the code.
#[test]
fn the_document_has_the_table() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/netfilter.md");
    let document = std::fs::read_to_string(path).expect("the document");
    let head = "| kind | control | binds |";
    let table = document.lines().skip_while(|line| *line != head).skip(2);
    let rows: Vec<&str> = table.take_while(|line| line.starts_with('|')).collect();
    let due = CONTROLS.map(|control| {
        let kind = match control.group {
            Group::Drop => "drops",
            Group::Rate => "limits a rate",
            Group::Mark => "marks",
            Group::Pair => "two at once",
            Group::Own => "own namespace",
        };
        let bound = BACKENDS.iter().zip(control.expected);
        let bound = bound.filter(|(_, effect)| *effect == Effect::Binds);
        let bound: Vec<_> = bound.map(|(netdev, _)| format!("`{netdev}`")).collect();
        let bound = match bound.len() {
            0 => "none".to_owned(),
            3 => "all".to_owned(),
            _ => bound.join(", "),
        };
        format!("| {kind} | {} | {bound} |", control.name)
    });
    assert_eq!(rows, due);
}

/// The result of `--live` for the first container of a lab.
fn look(lab: &Lab, args: &[&str]) -> Value {
    let netns = lab.container(0).netns().path();
    let mut command = Command::new(env!("CARGO_BIN_EXE_rocinante"));
    command.args(["policy-check", "--json", "--live", &netns]).args(args);
    let output = lab.host().output(&mut command).expect("the program starts");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{text}");
    serde_json::from_str::<Value>(&text).expect("JSON")["live"].clone()
}

/// The effects of the thing that has this in its name.
fn effects(live: &Value, part: &str) -> Value {
    let found = live["found"].as_array().expect("a list");
    let of = found.iter().find(|found| found["what"].as_str().unwrap().contains(part));
    of.unwrap_or_else(|| panic!("{part}: {live:#}"))["effect"].clone()
}

/// A container on a host of its own, with a rule that an ifb shadows.
#[test]
fn the_path_of_a_running_container_is_read() {
    let lab = match Lab::new(&LabConfig { containers: 2, ..LabConfig::default() }) {
        Ok(lab) => lab,
        Err(why) => {
            eprintln!("SKIPPED policy::the_path_of_a_running_container_is_read: {why}");
            return;
        }
    };
    let empty = look(&lab, &[]);
    assert_eq!(
        (&empty["links"][0], &empty["found"]),
        (&"eth0 veth0".into(), &Value::Array(vec![]))
    );

    // Two containers: the rules of the other one do not appear.
    let script = "table netdev s {\nchain a {\ntype filter hook ingress device \"veth0\" \
                  priority 0; policy accept;\ncounter\n}\nchain b {\ntype filter hook ingress \
                  device \"veth1\" priority 0; policy accept;\ncounter\n}\n}\n";
    lab.host().nft(script).expect("rules");
    lab.container(0)
        .nft("table inet o {\nchain c {\ntype filter hook output priority 0; policy drop;\n}\n}\n")
        .unwrap();
    let live = look(&lab, &[]);
    let binds = serde_json::json!(["binds", "binds", "binds"]);
    assert_eq!(effects(&live, "netdev s a"), binds);
    assert_eq!(effects(&live, "inet o c"), serde_json::json!(["binds", "bypassed", "bypassed"]));
    assert!(!live.to_string().contains("netdev s b"), "{live:#}");

    let _shaper = Shaper::ifb(lab.host(), "veth0", 9000, &Tbf::mbit(10)).expect("an ifb");
    lab.container(0).nft("delete table inet o").expect("its own rule goes");
    let peer = lab.container(1).ipv4().to_string();
    let live = look(&lab, &["--probe", &peer]);
    let none = serde_json::json!(["bypassed", "bypassed", "bypassed"]);
    assert_eq!(effects(&live, "netdev s a"), none);
    assert!(live["warnings"].to_string().contains("shadowed"), "{live:#}");
    assert_eq!(effects(&live, "tc tbf on ifb0"), binds);
    assert_eq!(live["probe"], serde_json::json!([10, 10]));
    let left = lab.host().command("nft list tables").unwrap();
    assert!(!left.contains("rocinante"), "{left}");
}

/// With VXLAN the path goes on: the VXLAN device, the host's own packets, the uplink.
#[test]
fn the_path_through_vxlan_is_read() {
    if let Err(why) = Availability::probe().vxlan {
        eprintln!("SKIPPED policy::the_path_through_vxlan_is_read: {why}");
        return;
    }
    let shape = Hosts { hosts: 2, containers_each: 1, between: Between::Vxlan { ipv6: false } };
    let lab = Lab::of_hosts(&shape, &LabConfig::default()).expect("a lab");
    let rules = "table inet h {\nchain out {\ntype filter hook output priority 0; policy drop;\n}\n\
                 chain f {\ntype filter hook forward priority 0; policy drop;\n}\n}\n\
                 table netdev u {\nchain e {\ntype filter hook egress device \"uplink0\" \
                 priority 0; policy accept;\ncounter\n}\n}\n";
    lab.host().nft(rules).expect("rules");
    let tbf = Tbf::mbit(10);
    let _shapers = [UPLINK, VXLAN].map(|link| Shaper::tbf(lab.host(), link, &tbf).expect("a tbf"));
    let live = look(&lab, &[]);
    let binds = serde_json::json!(["binds", "binds", "binds"]);
    for part in ["inet h out", "netdev u e", "tc tbf on uplink0", "tc tbf on vxlan0"] {
        assert_eq!(effects(&live, part), binds, "{part}: {live:#}");
    }
    assert!(live.to_string().contains("on VXLAN's UDP 4789"), "{live:#}");
    // The outer packets are not forwarded.
    let calls = "/proc/sys/net/bridge/bridge-nf-call-iptables";
    let on = lab.host().run(|| std::fs::read_to_string(calls)).expect("entered");
    if !on.is_ok_and(|value| value.trim() == "1") {
        let none = serde_json::json!(["bypassed", "bypassed", "bypassed"]);
        assert_eq!(effects(&live, "inet h f"), none, "{live:#}");
    }
}

/// Legacy iptables and IPsec, which `nft` does not list.
#[test]
fn rules_that_nft_does_not_list_are_on_the_path() {
    let lab = match Lab::new(&LabConfig { containers: 2, ..LabConfig::default() }) {
        Ok(lab) => lab,
        Err(why) => {
            eprintln!("SKIPPED policy::rules_that_nft_does_not_list: {why}");
            return;
        }
    };
    let binds_udp = serde_json::json!(["binds", "bypassed", "bypassed"]);
    let binds = serde_json::json!(["binds", "binds", "binds"]);
    let none = serde_json::json!(["bypassed", "bypassed", "bypassed"]);
    let (own, to) = (lab.container(0).ipv4().to_string(), lab.container(1).ipv4().to_string());
    let template = ["tmpl", "src", &own, "dst", &to, "proto", "esp", "mode", "transport"];
    let policy = ["xfrm", "policy", "add", "src", &own, "dst", &to, "dir", "out"];
    lab.container(0).netns().ip(&[&policy[..], &template].concat()).expect("a policy");
    assert_eq!(effects(&look(&lab, &[]), "ipsec: 1 policies of direction out"), binds_udp);

    let iptables = |netns: &Netns, rule: &str| {
        let mut command = Command::new("iptables-legacy");
        let output = netns.output(command.args(rule.split_whitespace()));
        output.is_ok_and(|output| output.status.success())
    };
    if !iptables(lab.host(), "-A FORWARD -p udp --dport 4791 -j DROP") {
        eprintln!("SKIPPED policy::legacy_iptables: this machine has none");
        return;
    }
    assert!(iptables(lab.host(), "-A INPUT -j ACCEPT"));
    assert!(iptables(lab.container(0).netns(), "-t mangle -P OUTPUT DROP"));
    // Whether the bridge calls them. Without the module it does not.
    let calls = "/proc/sys/net/bridge/bridge-nf-call-iptables";
    for (value, effect) in [("1", &binds), ("0", &none)] {
        let set = lab.host().run(|| std::fs::write(calls, value)).expect("entered");
        if set.is_ok() || value == "0" {
            assert_eq!(&effects(&look(&lab, &[]), "iptables filter (forward)"), effect);
        }
    }
    let live = look(&lab, &[]);
    assert!(live["warnings"].to_string().contains("bridge-nf-call"), "{live:#}");
    assert!(!live.to_string().contains("(input)"), "it does not lie on the path: {live:#}");
    assert_eq!(effects(&live, "iptables mangle (output)"), binds_udp);
}
