//! The response that a request's query selects, as in Fortio: `delay=150us:10,2ms:5`, `status=404:10,503:5`,
//! `size=1024:10`, `close=true`, `header=Name:value`.

use std::time::Duration;

use crate::go;

/// Maximum delay of a response.
const MAX_DELAY: Duration = Duration::from_secs(60);
/// Maximum size of a response's body in bytes.
const MAX_SIZE: usize = 1 << 20;

/// Properties of the response to a request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Behavior {
    pub(super) delay: Duration,
    /// `None` for 200.
    pub(super) status: Option<u16>,
    /// Size of the body; `None` for the body of the request.
    pub(super) size: Option<usize>,
    /// Close the connection after the response.
    pub(super) closes: bool,
    pub(super) headers: Vec<(String, String)>,
}

impl Behavior {
    /// Parses the query of a URL. The random choices are made here.
    pub(super) fn of(query: &str, rng: &mut fastrand::Rng) -> Result<Self, String> {
        let mut behavior = Self::default();
        for (name, value) in form_urlencoded::parse(query.as_bytes()) {
            let invalid = |reason: String| format!("{name}={value}: {reason}");
            match &*name {
                "delay" => {
                    let delay = choose(&value, rng, go::duration).map_err(invalid)?;
                    behavior.delay = delay.unwrap_or_default().min(MAX_DELAY);
                }
                "status" => behavior.status = choose(&value, rng, status).map_err(invalid)?,
                "size" => {
                    let size = |text: &str| text.parse().map_err(|_| "is not a number".to_owned());
                    behavior.size =
                        choose(&value, rng, size).map_err(invalid)?.map(|size: usize| size.min(MAX_SIZE));
                }
                "close" => {
                    let close = |text: &str| text.parse().map_err(|_| "is neither true nor false".to_owned());
                    behavior.closes = choose(&value, rng, close).map_err(invalid)?.unwrap_or(false);
                }
                "header" => behavior.headers.push(header(&value).map_err(invalid)?),
                _ => {}
            }
        }
        Ok(behavior)
    }
}

/// Chooses one of the values `VALUE:PERCENT,…`, or none for the rest to 100 %. A value without a percentage is chosen
/// if none before it is.
fn choose<T>(
    text: &str,
    rng: &mut fastrand::Rng,
    parse: impl Fn(&str) -> Result<T, String>,
) -> Result<Option<T>, String> {
    let mut random = rng.f64() * 100.0;
    let mut chosen = None;
    for item in text.split(',') {
        let (value, percent) = match item.rsplit_once(':') {
            Some((value, percent)) => {
                let percent: f64 =
                    percent.parse().map_err(|_| "the percentage is not a number".to_owned())?;
                (value, percent)
            }
            None => (item, 100.0),
        };
        let value = parse(value)?;
        if !(0.0..=100.0).contains(&percent) {
            return Err("the percentage is not between 0 and 100".to_owned());
        }
        if chosen.is_none() && random < percent {
            chosen = Some(value);
        }
        random -= percent;
    }
    Ok(chosen)
}

fn status(text: &str) -> Result<u16, String> {
    text.parse().ok().filter(|status| (200..600).contains(status)).ok_or_else(|| "is not a status".to_owned())
}

fn header(text: &str) -> Result<(String, String), String> {
    let (name, value) = text.split_once(':').ok_or("has no colon")?;
    let (name, value) = (name.trim(), value.trim());
    let is_valid =
        http::HeaderName::from_bytes(name.as_bytes()).is_ok() && http::HeaderValue::from_str(value).is_ok();
    if is_valid { Ok((name.to_owned(), value.to_owned())) } else { Err("is not a header".to_owned()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_query_sets_the_response() {
        let mut rng = fastrand::Rng::with_seed(1);
        let behavior =
            Behavior::of("delay=2ms&status=503&size=10&close=true&header=X-A:b%20c&other=1", &mut rng);
        let expected = Behavior {
            delay: Duration::from_millis(2),
            status: Some(503),
            size: Some(10),
            closes: true,
            headers: vec![("X-A".to_owned(), "b c".to_owned())],
        };
        assert_eq!(behavior, Ok(expected));
        for query in
            ["delay=x", "status=99", "status=200:x", "size=-1", "close=maybe", "header=x", "status=500:101"]
        {
            assert!(Behavior::of(query, &mut rng).is_err(), "{query}");
        }
    }

    #[test]
    fn distributions_have_their_shares() {
        let mut rng = fastrand::Rng::with_seed(1);
        let mut counts = [0; 3];
        for _ in 0..10_000 {
            match Behavior::of("status=404:10,503:5", &mut rng).unwrap().status {
                Some(404) => counts[0] += 1,
                Some(503) => counts[1] += 1,
                _ => counts[2] += 1,
            }
        }
        assert!((900..1_100).contains(&counts[0]) && (420..580).contains(&counts[1]), "{counts:?}");
    }
}
