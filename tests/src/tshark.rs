//! What tshark prints, read.

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
