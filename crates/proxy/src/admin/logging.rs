//! `/logging`: shows and changes log levels, with Envoy's parameters. A logger is a Rust module.

use std::fmt::Write as _;

use axum::{
    extract::Query,
    http::StatusCode,
    response::{IntoResponse, Response},
};
use skysail_core::logging;
use tracing::level_filters::LevelFilter;

const USAGE: &str = "\
usage: /logging?<name>=<level> (change single level)
usage: /logging?paths=name1:level1,name2:level2,... (change multiple levels)
usage: /logging?level=<level> (change all levels)
levels: trace debug info warning error critical off
";

/// A module (`None` for all) and its new level.
type Change<'a> = (Option<&'a str>, LevelFilter);

pub(super) async fn page(Query(options): Query<Vec<(String, String)>>) -> Response {
    let outcome = changes(&options).and_then(|changes| {
        let set = |(module, level)| logging::set_level(module, level).map_err(|error| error.to_string());
        changes.into_iter().try_for_each(set)
    });
    let (status, mut text) = match outcome {
        Ok(()) => (StatusCode::OK, String::new()),
        Err(reason) => (StatusCode::BAD_REQUEST, format!("error: {reason}\n\n{USAGE}")),
    };
    text.push_str("active loggers:\n");
    for (module, level) in logging::levels() {
        let _ = writeln!(text, "  {}: {level}", module.as_deref().unwrap_or("default"));
    }
    (status, text).into_response()
}

/// Parses the query parameters.
fn changes(options: &[(String, String)]) -> Result<Vec<Change<'_>>, String> {
    let mut changes = Vec::new();
    for (name, value) in options {
        match name.as_str() {
            "level" => changes.push((None, level(value)?)),
            "paths" => {
                for path in value.split(',') {
                    let (module, text) =
                        path.rsplit_once(':').ok_or_else(|| format!("{path:?} is not NAME:LEVEL"))?;
                    changes.push((Some(module), level(text)?));
                }
            }
            module => changes.push((Some(module), level(value)?)),
        }
    }
    Ok(changes)
}

/// Parses Envoy's name of a level. `critical` maps to `error`, the highest level here.
pub(crate) fn level(name: &str) -> Result<LevelFilter, String> {
    Ok(match name {
        "trace" => LevelFilter::TRACE,
        "debug" => LevelFilter::DEBUG,
        "info" => LevelFilter::INFO,
        "warning" | "warn" => LevelFilter::WARN,
        "error" | "critical" => LevelFilter::ERROR,
        "off" => LevelFilter::OFF,
        _ => return Err(format!("{name:?} is not a level")),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_have_envoys_meaning() {
        let read = |name: &str, value: &str| {
            let options = [(name.to_owned(), value.to_owned())];
            changes(&options).map(|changes| {
                let owned = |(module, level): Change<'_>| (module.map(str::to_owned), level);
                changes.into_iter().map(owned).collect::<Vec<_>>()
            })
        };
        assert_eq!(read("level", "warning"), Ok(vec![(None, LevelFilter::WARN)]));
        let named = |name: &str, level| (Some(name.to_owned()), level);
        assert_eq!(read("skysail_xds", "debug"), Ok(vec![named("skysail_xds", LevelFilter::DEBUG)]));
        assert_eq!(
            read("paths", "skysail_proxy::app:off,skysail_xds:critical"),
            Ok(vec![named("skysail_proxy::app", LevelFilter::OFF), named("skysail_xds", LevelFilter::ERROR)])
        );
        assert!(read("level", "loud").is_err() && read("paths", "a").is_err() && read("a", "").is_err());
    }
}
