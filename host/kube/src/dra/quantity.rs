//! Quantities of Kubernetes, as far as they are bits per second.

/// The rates that a share may reserve: those that the agent takes.
pub(crate) const LEAST: u64 = 1_000_000;
const MOST: u64 = 1_000_000_000_000;

const DECIMAL: [(&str, u32); 7] =
    [("", 0), ("k", 3), ("M", 6), ("G", 9), ("T", 12), ("P", 15), ("E", 18)];
const BINARY: [&str; 6] = ["Ki", "Mi", "Gi", "Ti", "Pi", "Ei"];
const SMALL: [(&str, u32); 3] = [("m", 3), ("u", 6), ("n", 9)];
/// More digits, or a longer exponent, are of no rate.
const DIGITS_MAX: usize = 20;

/// The bits per second of a share that the scheduler allocated. The scheduler rounds up, and writes
/// the result with binary units where these are shorter, so any quantity of whole bits is one.
///
/// Error: why it is none, in words.
pub(crate) fn share(text: &str) -> Result<u64, String> {
    let bits = whole(text).map_err(|why| format!("{} {why}", short(text)))?;
    if (LEAST..=MOST).contains(&bits) {
        return Ok(bits);
    }
    Err(format!("{} is not between 1M and 1T, in bits per second", short(text)))
}

/// A number of bits that a user may have written.
pub(crate) fn short(text: &str) -> String {
    let cut: String = text.chars().take(40).collect();
    format!("{cut:?}{}", if cut.len() < text.len() { "…" } else { "" })
}

fn whole(text: &str) -> Result<u64, &'static str> {
    const NONE: &str = "is no quantity such as 3G";
    let (is_negative, text) = match text.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, text.strip_prefix('+').unwrap_or(text)),
    };
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, suffix) = text.split_at(end);
    let (before, after) = number.split_once('.').unwrap_or((number, ""));
    if after.contains('.') || (before.is_empty() && after.is_empty()) {
        return Err(NONE);
    }
    let after = after.trim_end_matches('0');
    let digits = format!("{}{after}", before.trim_start_matches('0'));
    // The value is these digits, times 10 and 1024 to these powers.
    let decimal = DECIMAL.iter().find(|(unit, _)| *unit == suffix);
    let small = SMALL.iter().find(|(unit, _)| *unit == suffix);
    let binary = BINARY.iter().position(|unit| *unit == suffix);
    let (tens, kibis) = match (decimal, small, binary) {
        (Some((_, tens)), ..) => (i64::from(*tens), 0),
        (_, Some((_, tens)), _) => (-i64::from(*tens), 0),
        (.., Some(at)) => (0, at as u32 + 1),
        _ => {
            let exponent = suffix.strip_prefix(['e', 'E']).ok_or(NONE)?;
            let number = exponent.strip_prefix(['+', '-']).unwrap_or(exponent);
            if number.is_empty() || !number.bytes().all(|it| it.is_ascii_digit()) {
                return Err(NONE);
            }
            let most = if exponent.starts_with('-') { -1000 } else { 1000 };
            (exponent.parse::<i64>().unwrap_or(most).clamp(-1000, 1000), 0)
        }
    };
    let digits_trimmed = digits.trim_start_matches('0');
    if digits_trimmed.is_empty() {
        return Ok(0);
    }
    if is_negative {
        return Err("is negative");
    }
    let tens = tens - after.len() as i64;
    if digits_trimmed.len() > DIGITS_MAX && tens >= 0 || tens > DIGITS_MAX as i64 {
        return Err("is too much");
    }
    if digits_trimmed.len() > DIGITS_MAX || tens < -(DIGITS_MAX as i64) {
        return Err("is no whole number of bits per second");
    }
    let value: u128 = digits_trimmed.parse().map_err(|_| NONE)?;
    let value = value.checked_mul(1_u128 << (10 * kibis)).ok_or("is too much")?;
    let power = 10_u128.pow(tens.unsigned_abs() as u32);
    let value = if tens < 0 {
        if !value.is_multiple_of(power) {
            return Err("is no whole number of bits per second");
        }
        value / power
    } else {
        value.checked_mul(power).ok_or("is too much")?
    };
    u64::try_from(value).map_err(|_| "is too much")
}

/// As the API server writes it: with the greatest decimal unit that leaves it whole.
pub(crate) fn written(bits: u64) -> String {
    let of = |tens: u32| 10_u64.pow(tens);
    let unit = DECIMAL.iter().rev().find(|(_, tens)| bits != 0 && bits.is_multiple_of(of(*tens)));
    let (unit, tens) = unit.unwrap_or(&DECIMAL[0]);
    format!("{}{unit}", bits / of(*tens))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_is_a_whole_number_of_bits() {
        for (text, bits) in [
            ("3G", 3_000_000_000),
            ("3e9", 3_000_000_000),
            ("3E9", 3_000_000_000),
            ("3.5G", 3_500_000_000),
            ("+3.000G", 3_000_000_000),
            ("3000000000", 3_000_000_000),
            ("3000000000000m", 3_000_000_000),
            ("3Gi", 3_221_225_472),
            ("1000000Ki", 1_024_000_000),
            ("0.5Gi", 536_870_912),
            ("1M", LEAST),
            ("1T", MOST),
            ("1000e+3", LEAST),
            ("10000000e-1", LEAST),
        ] {
            assert_eq!(share(text), Ok(bits), "{text}");
        }
        for (text, why) in [
            ("", "no quantity"),
            (".", "no quantity"),
            ("G", "no quantity"),
            ("3 G", "no quantity"),
            ("3g", "no quantity"),
            ("3Gib", "no quantity"),
            ("3e", "no quantity"),
            ("3e+-9", "no quantity"),
            ("1.2.3", "no quantity"),
            ("٣G", "no quantity"),
            ("-3G", "negative"),
            ("-1n", "negative"),
            ("0", "is not between"),
            ("-0", "is not between"),
            ("999999", "is not between"),
            ("3000m", "is not between"),
            ("1.1T", "is not between"),
            ("1E", "is not between"),
            ("99999999999999999999E", "too much"),
            ("1e999999999999999999999", "too much"),
            ("18446744073709551616", "too much"),
            ("1500m", "whole number"),
            ("0.0000001", "whole number"),
            ("1e-999999999999999999999", "whole number"),
            ("1n", "whole number"),
        ] {
            let said = share(text).expect_err(text);
            assert!(said.contains(why), "{text}: {said}");
        }
        let long = share(&"9".repeat(10_000)).expect_err("too much");
        assert!(long.len() < 200, "{long}");
    }

    #[test]
    fn quantities_are_written_as_the_server_does() {
        for (bits, text) in
            [(0, "0"), (7, "7"), (1500, "1500"), (25_000_000_000, "25G"), (2_500_000_000, "2500M")]
        {
            assert_eq!(written(bits), text);
        }
    }
}
