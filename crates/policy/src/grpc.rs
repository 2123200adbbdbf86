//! The timeout of a gRPC client (`grpc-timeout`).
//! Source: <https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md>.

use std::time::Duration;

use crate::config::route::GrpcTimeout;
use skysail_http::head::Headers;

/// Returns the client's timeout; `None` if the header is missing or invalid.
pub fn timeout(headers: &Headers) -> Option<Duration> {
    let (unit, digits) = headers.header("grpc-timeout")?.split_last()?;
    if digits.is_empty() || digits.len() > 8 || !digits.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let count: u64 = str::from_utf8(digits).ok()?.parse().ok()?;
    Some(match unit {
        b'H' => Duration::from_secs(count * 3600),
        b'M' => Duration::from_secs(count * 60),
        b'S' => Duration::from_secs(count),
        b'm' => Duration::from_millis(count),
        b'u' => Duration::from_micros(count),
        b'n' => Duration::from_nanos(count),
        _ => return None,
    })
}

/// Sets the timeout, in the finest of the units ms, s, min and h that fits into eight digits.
pub fn set_timeout(headers: &mut Headers, timeout: Duration) {
    const MAX: u128 = 99_999_999;
    let (millis, seconds) = (timeout.as_millis(), u128::from(timeout.as_secs()));
    let (count, unit) = match () {
        () if millis <= MAX => (millis, 'm'),
        () if seconds <= MAX => (seconds, 'S'),
        () if seconds / 60 <= MAX => (seconds / 60, 'M'),
        () => ((seconds / 3600).min(MAX), 'H'),
    };
    headers.set("grpc-timeout", format!("{count}{unit}").as_bytes());
}

impl GrpcTimeout {
    /// Returns the timeout that applies for a client with this timeout; `None` for no limit.
    pub fn bound(self, waits: Option<Duration>) -> Option<Duration> {
        let waits = waits.filter(|waits| !waits.is_zero());
        let bounded = match (waits, self.max) {
            (Some(waits), Some(max)) => Some(waits.min(max)),
            (waits, max) => waits.or(max),
        };
        bounded.map(|time| match self.offset {
            Some(offset) if time > offset => time - offset,
            _ => time,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeouts_are_read_and_written() {
        let read = |text: &str| {
            let mut headers = Headers::default();
            headers.append("grpc-timeout", text.as_bytes());
            timeout(&headers)
        };
        assert_eq!(read("100m"), Some(Duration::from_millis(100)));
        assert_eq!(read("2H"), Some(Duration::from_secs(7200)));
        assert_eq!(read("99999999S"), Some(Duration::from_secs(99_999_999)));
        for wrong in ["", "m", "100", "100000000m", "-1m", "1 m", "1x"] {
            assert_eq!(read(wrong), None, "{wrong}");
        }
        let write = |time| {
            let mut headers = Headers::default();
            set_timeout(&mut headers, time);
            String::from_utf8(headers.header("grpc-timeout").unwrap().to_vec()).unwrap()
        };
        assert_eq!(write(Duration::from_millis(1500)), "1500m");
        assert_eq!(write(Duration::from_secs(200_000)), "200000S");
        assert_eq!(write(Duration::from_secs(200_000_000)), "3333333M");
    }

    #[test]
    fn the_timeout_of_a_client_is_bounded() {
        let [one, two, five] = [1, 2, 5].map(Duration::from_secs);
        let bound = |max, offset, waits| GrpcTimeout { max, offset }.bound(waits);
        assert_eq!(bound(None, None, Some(five)), Some(five));
        assert_eq!(bound(Some(two), None, Some(five)), Some(two));
        assert_eq!(bound(Some(two), None, None), Some(two));
        assert_eq!(bound(None, None, None), None);
        assert_eq!(bound(None, Some(one), Some(two)), Some(one));
        assert_eq!(bound(None, Some(five), Some(two)), Some(two));
    }
}
