//! `main`: the page for a traveller's browser. Its script calls the other services by their paths at the same address, so
//! the page needs an ingress gateway that routes these paths (`examples/airline-ingress`).

use axum::{Router, response::Html, routing::get};

use crate::flight;

const PAGE: &str = include_str!("page.html");

/// Returns the routes: the page at `/`.
pub(crate) fn router() -> Router {
    let airports: Vec<String> = flight::airports().map(|code| format!("\"{code}\"")).collect();
    let page = PAGE.replace("__AIRPORTS__", &format!("[{}]", airports.join(",")));
    Router::new().route("/", get(async || Html(page)))
}
