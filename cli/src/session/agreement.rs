//! The client's request, and the check that the server was started for the same.
//!
//! The client's line is `{"rocinante":1,"command":"perf write-bw","options":{"size":64,…}}`. The
//! names of the options are those of the command line. An option that the server was given must
//! equal the client's. The client decides the other options.

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The server's answer if it agrees.
pub const ACCEPTED: &str = "accepted";

const VERSION: u32 = 1;

/// A client's request.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Request {
    rocinante: u32,
    command: String,
    /// The client's options, by their names.
    pub options: Value,
}

/// The client's line.
#[must_use]
pub fn request(command: &str, plan: &impl Serialize) -> String {
    let options = serde_json::to_value(plan).expect("options are JSON");
    let request = Request { rocinante: VERSION, command: command.to_owned(), options };
    serde_json::to_string(&request).expect("a request is JSON")
}

/// Reads the client's line. Error: the line has another format.
pub fn parse(line: &str) -> Result<Request, String> {
    serde_json::from_str(line).map_err(|error| format!("its first line is no request: {error}"))
}

/// Checks that a client's request is for the command and options of this server. Error: the
/// differences, in words that suit both sides.
pub fn check(command: &str, given: &impl Serialize, request: &Request) -> Result<(), String> {
    if request.rocinante != VERSION {
        return Err(format!(
            "the client speaks version {} of the exchange and the server version {VERSION}: use the same version on both sides",
            request.rocinante
        ));
    }
    if request.command != command {
        return Err(format!(
            "the client runs `rocinante {}` and the server `rocinante {command}`: start both with the same command",
            printable(&request.command)
        ));
    }
    let given = serde_json::to_value(given).expect("options are JSON");
    let Value::Object(given) = given else { return Ok(()) };
    let differences = given.iter().filter_map(|(name, here)| {
        let there = request.options.get(name).unwrap_or(&Value::Null);
        let differs = !here.is_null() && *here != Value::Bool(false) && here != there;
        differs
            .then(|| format!("--{name} is {} at the client and {here} at the server", shown(there)))
    });
    let differences: Vec<String> = differences.collect();
    if differences.is_empty() {
        return Ok(());
    }
    Err(format!("{}: give both the same, or leave it out at the server", differences.join(", ")))
}

fn shown(value: &Value) -> String {
    match value {
        Value::Null | Value::Bool(false) => "not given".to_owned(),
        other => printable(&other.to_string()),
    }
}

fn printable(text: &str) -> String {
    text.chars().take(80).map(|c| if c.is_control() { '?' } else { c }).collect()
}

/// Checks that the server agreed. Error: the peer answered something else.
pub fn accepted(answer: &str) -> Result<(), String> {
    if answer == ACCEPTED {
        return Ok(());
    }
    Err(format!(
        "the program that listens there is no rocinante server: it answered {:?}: check the port (-p)",
        printable(answer)
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Serialize)]
    struct TestOptions {
        size: Option<u32>,
        iters: Option<u64>,
        chk: bool,
    }

    fn verdict(client: &TestOptions, server: &TestOptions) -> Result<(), String> {
        check("pingpong", server, &parse(&request("pingpong", client)).unwrap())
    }

    #[test]
    fn what_the_server_was_given_must_be_the_clients() {
        let client = TestOptions { size: Some(64), iters: None, chk: false };
        let silent = TestOptions { size: None, iters: None, chk: false };
        assert_eq!(verdict(&client, &silent), Ok(()));
        assert_eq!(verdict(&client, &client), Ok(()));
        let other = TestOptions { size: Some(4096), iters: Some(5), chk: true };
        let why = verdict(&client, &other).unwrap_err();
        assert!(why.contains("--size is 64 at the client and 4096 at the server"), "{why}");
        assert!(why.contains("--iters is not given at the client and 5 at the server"), "{why}");
        assert!(why.contains("--chk is not given at the client and true at the server"), "{why}");
    }

    #[test]
    fn another_command_or_version_is_named() {
        let options = TestOptions { size: None, iters: None, chk: false };
        let mut request = parse(&request("perf write-bw", &options)).unwrap();
        let why = check("perf read-bw", &options, &request).unwrap_err();
        assert!(
            why.contains("`rocinante perf write-bw`") && why.contains("`rocinante perf read-bw`")
        );
        request.rocinante = 7;
        assert!(check("perf read-bw", &options, &request).unwrap_err().contains("version 7"));
    }

    #[test]
    fn other_programs_are_no_clients() {
        for line in ["", "GET / HTTP/1.1", "{}", "[1]", "{\"rocinante\":1}"] {
            assert!(parse(line).is_err(), "{line}");
        }
        assert!(accepted("SSH-2.0-OpenSSH\u{7}").unwrap_err().contains("SSH-2.0-OpenSSH?"));
    }
}
