//! The rates of an agent's class bind each backend in both directions.

use std::fs;
use std::process::Command;

use rocinante::device::Backend;
use rocinante_lab::{Lab, LabConfig, Netns};
use rocinante_tests::on_backends;

use super::handed::{Agent, start};
use super::{command, rocinante, words};

/// Messages, and bytes of each.
const MESSAGES: u64 = 40;
const SIZE: u64 = 60_000;

/// Bytes that a tbf of the agent has let through, and frames that it had wait.
fn passed(host: &Netns, link: &str) -> (u64, u64) {
    let listing = host.json(&format!("tc -s -j qdisc show dev {link}")).unwrap();
    let tbf = &listing[0];
    assert_eq!((&tbf["kind"], &tbf["handle"]), (&"tbf".into(), &"4791:".into()), "{listing:#}");
    (tbf["bytes"].as_u64().unwrap(), tbf["overlimits"].as_u64().unwrap())
}

fn messages_pass_the_rates_on(backend: Backend) {
    let lab = Lab::new(&LabConfig::default()).unwrap();
    let mut agent = Agent::start(lab.host());
    let class = "[[class]]\nname = \"slow\"\ncontainers = [\"veth0\"]\nports_max = 3\n\
                 ingress_rate = \"20mbit\"\negress_rate = \"20mbit\"\n";
    let lines = fs::read_to_string(agent.config()).unwrap();
    fs::write(agent.config(), format!("{lines}{class}")).unwrap();
    agent.kill();
    agent.start_again(lab.host());
    let [client, server] = [0, 1].map(|index| lab.container(index));
    let line = format!("pingpong --netdev {backend}");
    let waiting = start(server, &agent, &line).that_waits();
    let asking = format!("{line} -n {MESSAGES} -s {SIZE} -c {}", server.ipv4());
    let done = start(client, &agent, &asking).finish().succeeded();
    assert!(done.err.contains("opened by the agent"), "{}", done.err);
    waiting.finish().succeeded();
    let links = lab.host().json("ip -j link show type ifb").unwrap();
    let mut names = links.as_array().unwrap().iter().filter_map(|it| it["ifname"].as_str());
    let ifb = names.find(|name| name.starts_with("roce-")).expect("an ifb");
    for link in ["veth0", ifb] {
        let (bytes, delayed) = passed(lab.host(), link);
        assert!(bytes > MESSAGES * SIZE && delayed > 0, "{link}: {bytes} bytes, {delayed} delayed");
    }
    // Where the agent has its usual place the operator sees it beside the rules.
    let mut looking = Command::new("unshare");
    let place = "mount -t tmpfs none /run && ln -s \"$1\" /run/rocinante-agent && shift && \"$@\"";
    let live = rocinante(words(&format!("policy-check --live {}", client.netns().path())));
    looking.args(["--mount", "sh", "-c", place, "sh"]).arg(agent.state());
    looking.arg(live.get_program()).args(live.get_args());
    let output = lab.host().output(&mut looking).unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    for due in [
        r#"agent, class "slow": ingress_rate 20000000 bit/s by a shaper: udp binds, packet binds"#,
        r#"agent, class "slow": egress_rate 20000000 bit/s by a shaper: udp binds, packet binds"#,
        "ports_max 3, requests_per_second 100, ",
        "udp bypassed, packet binds, afxdp binds",
    ] {
        assert!(said.contains(due), "{due}: {said}{}", String::from_utf8_lossy(&output.stderr));
    }
    let mut agents =
        command(env!("CARGO_BIN_EXE_rocinante-agent-under-test"), ["release", "veth0"]);
    agents.arg("--force").arg("--config").arg(agent.config());
    assert!(lab.host().output(&mut agents).unwrap().status.success());
    let links = lab.host().command("ip link show type ifb").unwrap();
    assert!(!links.contains("roce-"), "{links}");
}

on_backends! {
    messages_of_packet_pass_the_rates_of_a_class: Packet + machine_root =>
        messages_pass_the_rates_on(Backend::Packet);
    messages_of_afxdp_pass_the_rates_of_a_class: Xdp + machine_root =>
        messages_pass_the_rates_on(Backend::Xdp);
}
