//! `main`: the page for a traveller's browser.

use axum::{Router, response::Html, routing::get};

const PAGE: &str = "<!doctype html>
<html lang=\"en\"><head><meta charset=\"utf-8\"><title>Airline</title></head>
<body><h1>Airline</h1>
<p>Log in with <code>POST /auth/login</code>, look for flights with <code>POST /flight/queryflights</code>,
book with <code>POST /booking/bookflights</code>, see your bookings at <code>GET /booking/byuser/ID</code>.</p>
</body></html>
";

/// Returns the routes: the page at `/`.
pub(crate) fn router() -> Router {
    Router::new().route("/", get(async || Html(PAGE)))
}
