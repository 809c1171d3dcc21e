//! `rocinante ucmatose`, `rdma-server` and `rdma-client` over loopback.

use super::{Addresses, Running, rocinante, words};

fn start(line: &str) -> Running {
    Running::start(&mut rocinante(words(line)))
}

#[test]
fn messages_on_several_connections() {
    let Addresses { server, client } = Addresses::new();
    for (options, messages) in
        [("-c 5 -C 30 -S 2000", 300), ("-c 300 -C 1", 600), ("-c 3 -S 0", 0), ("", 20)]
    {
        let mut at_server = start(&format!("ucmatose -b {server} {options} --json"));
        at_server.says("waiting for");
        let at_client = start(&format!("ucmatose -s {server} -b {client} {options} --json"));
        for done in [at_client.finish().succeeded(), at_server.finish().succeeded()] {
            assert_eq!(done.json()["messages"], messages, "{options}");
        }
    }
}

#[test]
fn one_message_each_way() {
    let Addresses { server, client } = Addresses::new();
    let mut at_server = start(&format!("rdma-server -s {server} -p 7000"));
    at_server.says("waiting for");
    let line = format!("rdma-client -s {server} -b {client} -p 7000 --json");
    let done = start(&line).finish().succeeded();
    assert_eq!((&done.json()["messages"], &done.json()["size"]), (&2.into(), &16.into()));
    at_server.finish().succeeded();
}

#[test]
fn errors_say_what_to_do() {
    let Addresses { server, client } = Addresses::new();
    start("ucmatose -b eth77").finish().failed(2, &["neither an IP address nor an interface"]);
    start("rdma-client").finish().failed(2, &["--server"]);
    let line = format!("ucmatose -s {server} -b {client} --patience 1");
    start(&line).finish().failed(1, &["cannot connect", "UDP port 4791"]);
    // The two sides do not agree on the number of connections.
    let mut at_server = start(&format!("ucmatose -b {server} -c 2 -p 7001 --patience 2"));
    at_server.says("waiting for");
    let line = format!("ucmatose -s {server} -b {client} -c 1 -p 7001 --patience 5");
    let at_client = start(&line);
    at_server.finish().failed(1, &["1 of 2 connections", "-c"]);
    at_client.finish().failed(1, &[]);
    let mut at_server = start(&format!("ucmatose -b {server} -c 1 -p 7002"));
    at_server.says("waiting for");
    let line = format!("ucmatose -s {server} -b {client} -c 2 -p 7002 --patience 2");
    start(&line).finish().failed(1, &["1 of 2 connections were made", "-c"]);
    at_server.finish().failed(1, &["it ended the connection", "the same -c"]);
}
