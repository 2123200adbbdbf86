//! Requests of other protocols than HTTP/1.1 at the rate of a schedule, by the engines of `skysail load`.
//!
//! The engine of `requests` stays for HTTP/1.1: it counts resumed TLS sessions, extends the window until a response has
//! arrived, and waits as long as late responses arrive.

use anyhow::Context as _;

use super::{Load, LoadOutcome, LoadProtocol, WindowBoundary};

/// Applies the load. Calls `on_boundary` on this thread when the measured window begins and ends.
pub(super) fn drive(
    load: &Load,
    protocol: LoadProtocol,
    mut on_boundary: impl FnMut(WindowBoundary),
) -> anyhow::Result<LoadOutcome> {
    let schedule = load.schedule.context("the load needs a schedule")?;
    let target = load.target;
    let (flags, url): (&[&str], String) = match protocol {
        LoadProtocol::Http1 => (&[], format!("http://{target}/echo")),
        LoadProtocol::Http2 => (&["--h2"], format!("http://{target}/echo")),
        LoadProtocol::Grpc => (&["--ping", "--grpc"], format!("grpc://{target}")),
        LoadProtocol::Tcp => (&[], format!("tcp://{target}")),
    };
    let duration = (load.warmup + load.window).as_nanos();
    let mut arguments = vec![
        format!("--qps={}", 1e9 / schedule.interval() as f64),
        format!("-c{}", load.connections),
        format!("-t{duration}ns"),
        format!("--payload-size={}", load.payload),
    ];
    arguments.extend(flags.iter().map(|flag| (*flag).to_owned()));
    arguments.push(url);
    let outcome = skysail_load::drive(&arguments, load.warmup, &mut on_boundary)?;
    Ok(LoadOutcome {
        due: outcome.due,
        sent: outcome.sent,
        late: outcome.late,
        requests: outcome.requests,
        unanswered: outcome.unanswered,
        refused: outcome.refused,
        resumed: 0,
        answered_in_window: outcome.answered_in_window,
        answered: outcome.answered,
    })
}
