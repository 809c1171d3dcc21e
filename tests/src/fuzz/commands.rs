//! The messages of an agent's control socket: commands, and the replies to them.

use rocinante_agent::fuzzing;

pub(super) fn run(data: &[u8]) {
    fuzzing::command(data);
}

pub(super) fn corpus() -> Vec<Vec<u8>> {
    let container = r#"{"container":{"name":"veth0","id":"c0ffee","engine":"docker",
        "namespace":4026532,"interface":2,"mac":"02:00:00:00:00:01","addresses":["10.9.0.1","fd09::1"],
        "fixed":true,"other_ways_out":["net1"],"ports":[{"backend":"packet","ports":1,"slots":180,
        "bytes":12582912}],"dropped":{"ipv4":7},"requests":{"granted":1,"lost":0,"refused":{"busy":3},
        "waited":{"p50_us":1,"p99_us":2,"max_us":3,"mean_us":2}}}}"#;
    let agent = r#"{"agent":{"version":"0.1.0","uptime_s":7,"containers":1,"ports":1,"bytes":12582912,
        "requests":{"granted":1,"lost":0,"refused":{},
        "waited":{"p50_us":1,"p99_us":2,"max_us":3,"mean_us":2}}}}"#;
    let texts = [
        r#"{"version":1,"command":"status","name":"veth0"}"#,
        r#"{"version":1,"command":"release","force":true,"more":[1,{}]}"#,
        r#"{"version":1,"command":"introduce","about":{"namespace":"/run/netns/a","interface":"eth0",
            "id":"c0ffee","engine":"cni"}}"#,
        r#"{"version":1,"command":"check","about":{"namespace":"/proc/7/ns/net","id":"","engine":"\u001b"}}"#,
        r#"{"version":2,"command":"status"}"#,
        r#"{"introduced":{"name":"veth0"}}"#,
        r#"{"released":{"name":"veth0\n"}}"#,
        r#"{"kept":{"name":"veth0","reason":"it has open ports"}}"#,
        r#"{"refused":{"reason":"no container is called \"a\""}}"#,
        r#"{"done":{}}"#,
        container,
        agent,
    ];
    texts.map(|text| text.as_bytes().to_vec()).into()
}
