//! tshark as a witness: it captures, and the tests read its output.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::Duration;

use nix::sys::signal::Signal;

use rocinante_lab::{ChildGuard, Netns};
use tempfile::{NamedTempFile, TempPath};

/// A capture of the RoCE packets that pass an interface. Dropping it removes its file.
#[derive(Debug)]
pub struct Capture {
    /// It ends before its file is removed.
    tshark: ChildGuard,
    file: TempPath,
}

impl Capture {
    /// Begins to capture at `device` in `netns`. Error: the text that tshark printed.
    pub fn start(netns: &Netns, device: &str) -> Result<Self, String> {
        let file = NamedTempFile::new().map_err(|error| error.to_string())?.into_temp_path();
        let mut command = Command::new("tshark");
        command.args(["-i", device, "-f", "udp port 4791", "-F", "pcap", "-w"]).arg(&file);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut tshark = netns.spawn(&mut command).map_err(|error| error.to_string())?;
        let stderr = tshark.child_mut().stderr.take().ok_or("tshark has no output")?;
        let mut said = String::new();
        for line in BufReader::new(stderr).lines().map_while(Result::ok) {
            if line.contains("Capture started") || line.contains("File:") {
                // tshark prints this once it captures, in all versions since 3.4.
                return Ok(Self { tshark, file });
            }
            said += &line;
        }
        Err(format!("tshark does not capture: {said}"))
    }

    /// These fields of each packet captured so far; of each field only its first value. tshark
    /// writes packets with a delay, and may have written the last one only in part. Error: tshark
    /// cannot be started; or it fails, as it does while the last packet is written only in part; or
    /// it calls a packet malformed.
    pub fn packets(&self, fields: &[&str]) -> Result<Vec<Vec<String>>, String> {
        let mut command = Command::new("tshark");
        command.arg("-r").arg(&self.file);
        // These dissectors guess from payloads and ports, and fail on our packets.
        for guess in ["rpcordma", "infiniband.eoib", "tftp"] {
            command.args(["--disable-protocol", guess]);
        }
        command.args(["-n", "-T", "fields", "-E", "separator=|", "-E", "occurrence=f"]);
        command.args(["-e", "_ws.malformed"]);
        fields.iter().for_each(|field| {
            command.args(["-e", field]);
        });
        let output = command.output().map_err(|error| format!("tshark: {error}"))?;
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr);
            return Err(format!("tshark, {}: {said}", output.status));
        }
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let packet = |line: &str| {
            let mut columns = line.split('|').map(|column| column.trim().to_owned());
            match columns.next().unwrap_or_default().as_str() {
                "" => Ok(columns.collect()),
                _ => Err(format!("tshark calls a packet malformed: {line}")),
            }
        };
        text.lines().map(packet).collect()
    }

    /// Ends the capture: all captured packets are written. Error: tshark does not end, or reports
    /// an error.
    pub fn stop(&mut self) -> Result<(), String> {
        self.tshark.signal(Signal::SIGINT);
        let ended = self.tshark.wait(Duration::from_secs(30)).map_err(|error| error.to_string())?;
        ended.success().then_some(()).ok_or_else(|| format!("the capturing tshark, {ended}"))
    }
}

/// Numbers that tshark prints, decimal or hexadecimal; and its truth values, as 1 and 0.
#[must_use]
pub fn number(text: &str) -> Option<u64> {
    let text = text.trim();
    match text {
        "" => None,
        "True" => Some(1),
        "False" => Some(0),
        _ => match text.strip_prefix("0x") {
            Some(digits) => u64::from_str_radix(digits, 16).ok(),
            None => text.parse().ok(),
        },
    }
}
