//! The limits that an agent on this host sets for a container.

use std::io;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect, recv,
    send, socket_with,
};
use serde_json::{Value, json};

use super::table::{ALL as BINDS, Effect, NONE};

/// The socket of its operator (docs/agent.md).
const CONTROL: &str = "/run/rocinante-agent/control.sock";
/// The longest message.
const BYTES_MAX: usize = 16 << 10;
const PATIENCE: Duration = Duration::from_secs(5);
/// Limits that are on the ports that the agent opens: a program opens one of `udp` itself.
const OF_PORTS: [Effect; 3] = [Effect::Bypassed, Effect::Binds, Effect::Binds];

/// The limits of the container with this end on the host and this network namespace, and the
/// backends that each binds. None if no agent runs, or none that knows the container. Error: why
/// the agent cannot be asked.
pub(super) fn limits(end: &str, namespace: u64) -> io::Result<Vec<(String, [Effect; 3])>> {
    match ask(end) {
        Ok((agent, Some(container))) if container["namespace"] == namespace => {
            Ok(of(&agent, &container))
        }
        Ok(_) | Err(Errno::NOENT | Errno::CONNREFUSED) => Ok(Vec::new()),
        Err(error) => Err(error.into()),
    }
}

/// The agent's own status, and that of the container.
fn ask(end: &str) -> Result<(Value, Option<Value>), Errno> {
    let kind = SocketType::SEQPACKET;
    let socket = socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None)?;
    for direction in [Timeout::Recv, Timeout::Send] {
        set_socket_timeout(&socket, direction, Some(PATIENCE)).map_err(|_| Errno::INVAL)?;
    }
    connect(&socket, &SocketAddrUnix::new(CONTROL)?)?;
    let request = json!({ "version": 1, "command": "status", "name": end });
    send(&socket, request.to_string().as_bytes(), SendFlags::NOSIGNAL)?;
    let (mut bytes, mut agent) = (vec![0; BYTES_MAX], Value::Null);
    loop {
        let (length, _) = recv(&socket, &mut bytes[..], RecvFlags::empty())?;
        let reply: Value = serde_json::from_slice(&bytes[..length]).map_err(|_| Errno::BADMSG)?;
        match (reply.get("container"), reply.get("agent")) {
            (Some(container), _) => return Ok((agent, Some(container.clone()))),
            (None, Some(own)) => agent = own.clone(),
            (None, None) => return Ok((agent, None)),
        }
    }
}

/// The limits in the status of a container, and of its agent.
fn of(agent: &Value, container: &Value) -> Vec<(String, [Effect; 3])> {
    let class = &container["class"];
    let name = format!("agent, class {}", class["name"]);
    let mut limits = Vec::new();
    for (rate, way) in [("ingress_rate", "ingress"), ("egress_rate", "egress")] {
        let Some(bits) = class[rate].as_u64() else { continue };
        match (&container["rate_fault"], container[way]["by"].as_str()) {
            (Value::String(fault), _) => {
                limits.push((format!("{name}: {rate} is not in force: {fault}"), NONE));
            }
            (_, Some(by)) => limits.push((format!("{name}: {rate} {bits} bit/s by a {by}"), BINDS)),
            (_, None) => {
                limits.push((format!("{name}: {rate} is not in force"), NONE));
            }
        }
    }
    // Of the uplinks that the agent shares.
    let uplinks = agent["uplinks"].as_array().map_or(&[][..], Vec::as_slice);
    let fault = match uplinks.iter().find_map(|uplink| uplink["fault"].as_str()) {
        _ if uplinks.is_empty() => Some("the agent shares no uplink"),
        fault => fault,
    };
    for share in ["uplink_rate", "uplink_ceil"] {
        let Some(bits) = class[share].as_u64() else { continue };
        limits.push(match fault {
            Some(fault) => (format!("{name}: {share} is not in force: {fault}"), NONE),
            None => (format!("{name}: {share} {bits} bit/s"), BINDS),
        });
    }
    let others = class.as_object().into_iter().flatten();
    let is_other = |key: &str| key != "name" && !key.ends_with("_rate") && !key.ends_with("_ceil");
    let others = others.filter(|(key, _)| is_other(key));
    let others: Vec<String> = others.map(|(key, value)| format!("{key} {value}")).collect();
    let others = match others.as_slice() {
        [] => "which is not configured: no ports".to_owned(),
        others => others.join(", "),
    };
    limits.push((format!("{name}: {others}"), OF_PORTS));
    limits
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_limit_says_whom_it_binds() {
        let mut container = json!({
            "class": { "name": "half", "ports_max": 8, "ingress_rate": 500, "egress_rate": 600,
                       "uplink_rate": 700 },
            "ingress": { "by": "shaper" }, "egress": { "by": "policer" },
        });
        let first = r#"agent, class "half": "#;
        let line = |text: &str| format!("{first}{text}");
        let mut agent = json!({ "uplinks": [{ "interface": "eth0" }] });
        let ports = (line("ports_max 8"), OF_PORTS);
        let share = (line("uplink_rate 700 bit/s"), BINDS);
        let rates = [
            (line("ingress_rate 500 bit/s by a shaper"), BINDS),
            (line("egress_rate 600 bit/s by a policer"), BINDS),
        ];
        let all = [&rates[..], &[share.clone(), ports.clone()]].concat();
        assert_eq!(of(&agent, &container), all);
        container["rate_fault"] = "htb 1: is there".into();
        let fault = |rate: &str| (line(&format!("{rate} is not in force: htb 1: is there")), NONE);
        let faults = [fault("ingress_rate"), fault("egress_rate")];
        let all = [&faults[..], &[share, ports.clone()]].concat();
        assert_eq!(of(&agent, &container), all);
        for (uplinks, why) in [
            (json!([]), "the agent shares no uplink"),
            (json!([{ "interface": "eth0" }, { "fault": "eth1: is gone" }]), "eth1: is gone"),
        ] {
            agent["uplinks"] = uplinks;
            let share = (line(&format!("uplink_rate is not in force: {why}")), NONE);
            let all = [&faults[..], &[share, ports.clone()]].concat();
            assert_eq!(of(&agent, &container), all);
        }
        let gone = (line("which is not configured: no ports"), OF_PORTS);
        assert_eq!(of(&agent, &json!({ "class": { "name": "half" } })), [gone]);
    }
}
