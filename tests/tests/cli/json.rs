//! The JSON of each command, of both sides, in success and in failure, is valid by `docs/schema`.
//! The other tests hold theirs against the schemas, too.

use std::collections::BTreeSet;

use nix::sys::signal::Signal;
use rocinante_tests::running::Running;
use rocinante_tests::unique;
use serde_json::{Value, json};

use super::{Addresses, rocinante, run, schema, with_results, words};

/// Runs both sides with `--json`, holds both objects against their schemas, and returns them.
fn both(server: &str, client: &str) -> [Value; 2] {
    let at_server = Running::start(&mut rocinante(words(&format!("{server} --json")))).that_waits();
    let client = run(&format!("{client} --json")).succeeded();
    let server = at_server.finish().succeeded();
    [server, client].map(|done| {
        assert_eq!(done.out.lines().count(), 1, "the result is the last line: {}", done.out);
        let object = done.json();
        schema::check(&object);
        assert_eq!(object["schema"], 1);
        assert_eq!(object["version"], env!("CARGO_PKG_VERSION"));
        object
    })
}

#[test]
fn perf_resolves_what_it_was_not_given() {
    for (server, client) in [
        ("perf write-bw --counters", "perf write-bw -n 100 --counters"),
        ("perf send-lat", "perf send-lat -n 50"),
        ("perf read-bw", "perf read-bw -D 1 -s 4096"),
        ("perf atomic-lat --cm", "perf atomic-lat --cm -n 20"),
    ] {
        let at = Addresses::new();
        let server = format!("{server} --netdev udp --bind {}", at.server);
        let [server, client] = both(&server, &at.client_line(client));
        for (own, other) in [(&server, &client), (&client, &server)] {
            assert_eq!((&own["mtu"], &own["tx_depth"].is_u64()), (&4096.into(), &true), "{own}");
            assert_eq!(own["remote"]["address"], other["local"]["address"]);
            assert_eq!(own["remote"]["qpn"], other["local"]["qpn"]);
        }
        assert_eq!(client["local"]["address"], at.client.to_string());
    }
}

#[test]
fn the_other_commands_of_two_sides() {
    let at = Addresses::new;
    let one = at();
    let [server, client] = both(
        &format!("pingpong --netdev udp --counters --bind {}", one.server),
        &one.client_line("pingpong --counters -n 50"),
    );
    assert_eq!(server["local"]["qpn"], client["remote"]["qpn"]);
    let two = at();
    let [server, client] = both(
        &format!("rping -s --netdev udp -a {}", two.server),
        &format!("rping -c --netdev udp -a {} -I {} -C 5", two.server, two.client),
    );
    assert_eq!(client["peer"], format!("{}:7174", two.server));
    let peer = server["peer"].as_str().unwrap();
    assert!(peer.starts_with(&two.client.to_string()), "{server}");
}

#[test]
fn failures_of_every_command() {
    let (here, there) = (unique::loopback(), unique::loopback());
    for (line, status) in [
        (format!("perf write-bw --netdev udp --bind {here} --patience 1 {there}"), 1),
        ("perf write-bw -V".to_owned(), 2),
        (format!("pingpong --netdev udp --bind {here} --patience 1 {there}"), 1),
        (format!("rping -c --netdev udp -a {there} -I {here} --patience 1"), 1),
        ("rping --nosuch".to_owned(), 2),
        ("rping -s --netdev udp -a 192.0.2.250".to_owned(), 1),
        ("devices nosuch0".to_owned(), 1),
        ("decode /no/such/file".to_owned(), 2),
        ("demo --nosuch".to_owned(), 2),
        ("perf --nosuch".to_owned(), 2),
        ("decode --nosuch".to_owned(), 2),
        ("decode --json-packets /no/such/file".to_owned(), 2),
        ("nosuch".to_owned(), 2),
    ] {
        let done = run(&format!("{line} --json")).failed(status, &[]);
        assert_eq!(done.out.lines().count(), 1, "{line}: {}", done.out);
        let object = done.json();
        assert!(object["error"]["kind"].is_string(), "{line}: {object}");
        let word = line.split(' ').next().unwrap();
        let command = if word == "nosuch" { "rocinante" } else { word };
        assert_eq!(object["command"], command);
    }
}

/// A command that a signal ends has the results so far.
#[test]
fn results_of_a_failure_have_the_form_of_a_success() {
    for (server, client, begun) in [
        (
            "pingpong --bind {s}",
            "pingpong -n 1000000000 --counters --bind {c} {s}",
            "remote address",
        ),
        ("perf send-lat --bind {s}", "perf send-lat -D 60 --bind {c} {s}", "#bytes"),
        ("rping -s -a {s}", "rping -c -a {s} -I {c}", "device"),
    ] {
        let object = with_results(|time| {
            let at = Addresses::new();
            let start = |line: &str| {
                let line = line.replace("{s}", &at.server.to_string());
                let line = line.replace("{c}", &at.client.to_string());
                Running::start(&mut rocinante(words(&format!("{line} --netdev udp"))))
            };
            let mut at_server = start(server).that_waits();
            let mut at_client = start(&format!("{client} --json")).that_says(begun);
            std::thread::sleep(time);
            at_client.child.signal(Signal::SIGINT);
            let client = at_client.finish().failed(130, &[]);
            at_server.child.signal(Signal::SIGTERM);
            let _ = at_server.finish();
            client
        });
        let object = object.json();
        schema::check(&object);
        assert_eq!(object["results"].as_array().map(Vec::len), Some(1), "{object}");
    }
}

#[test]
fn devices_of_this_machine() {
    run("devices --json --counters").succeeded();
    run("devices lo --json").succeeded();
}

#[test]
fn a_key_that_the_schema_does_not_know_is_found() {
    let mut object = run("devices lo --json").succeeded().json();
    assert_eq!(schema::errors(&object), [""; 0]);
    object["devices"][0]["gids"][0]["new_key"] = json!(1);
    let errors = schema::errors(&object);
    assert!(errors.len() == 1 && errors[0].contains("new_key"), "{errors:?}");
    let mut object = run("perf write-bw -o 1 --json").failed(2, &[]).json();
    object["tx-depth"] = json!(1);
    assert!(schema::errors(&object)[0].contains("tx-depth"));
}

/// The keys of all objects that a schema describes.
fn keys(schema: &Value, found: &mut BTreeSet<String>) {
    match schema {
        Value::Object(members) => {
            if let Some(Value::Object(properties)) = members.get("properties") {
                found.extend(properties.keys().cloned());
                for schema in properties.values() {
                    keys(schema, found);
                }
            }
            for (name, member) in members.iter().filter(|(name, _)| *name != "properties") {
                if name != "description" {
                    keys(member, found);
                }
            }
        }
        Value::Array(members) => members.iter().for_each(|member| keys(member, found)),
        _ => {}
    }
}

/// The properties of a schema without a description, which do not refer to one that has it either.
fn unexplained(schema: &Value, found: &mut Vec<String>) {
    match schema {
        Value::Object(members) => {
            if let Some(Value::Object(properties)) = members.get("properties") {
                let explained = |key: &Value| {
                    key["description"].as_str().is_some_and(|text| !text.is_empty())
                        || key["$ref"].is_string()
                };
                let wrong = properties.iter().filter(|(_, key)| !explained(key));
                found.extend(wrong.map(|(name, _)| name.clone()));
            }
            members.values().for_each(|member| unexplained(member, found));
        }
        Value::Array(members) => members.iter().for_each(|member| unexplained(member, found)),
        _ => {}
    }
}

#[test]
fn each_key_says_what_it_means_and_the_document_leads_to_each_schema() {
    let text = std::fs::read_to_string(schema::folder().join("../json.md")).unwrap();
    for (name, schema) in schema::SCHEMAS.iter() {
        let mut found = Vec::new();
        unexplained(schema, &mut found);
        assert!(found.is_empty(), "docs/schema/{name}.json: no description of {found:?}");
        assert!(text.contains(&format!("(schema/{name}.json)")), "docs/json.md: no {name}.json");
    }
}

#[test]
fn keys_are_snake_case() {
    for (name, schema) in schema::SCHEMAS.iter() {
        let mut found = BTreeSet::new();
        keys(schema, &mut found);
        let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
        let wrong: Vec<String> = found.into_iter().filter(|key| !key.chars().all(plain)).collect();
        assert!(wrong.is_empty(), "{name}: {wrong:?}");
    }
}
