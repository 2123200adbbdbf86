//! Local rate limits.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test ends with the first thing that goes wrong"
)]

#[path = "support/files.rs"]
mod files;
#[path = "support/program.rs"]
mod program;
mod support;

use files::{bootstrap, cluster, filter, http, listener, to};
use program::Program;
use serde_json::json;
use support::{Client, echo, within};
use tokio::net::TcpStream;

#[tokio::test]
async fn requests_above_the_rate_limit_are_refused_until_tokens_are_available() {
    let always = json!({"default_value": {"numerator": 100}});
    let limit = |interval: &str| {
        let config = json!({
            "stat_prefix": "l",
            "token_bucket": {"max_tokens": 3, "tokens_per_fill": 3, "fill_interval": interval},
            "filter_enabled": always,
            "filter_enforced": always
        });
        http(&[filter("http.local_ratelimit.v3.LocalRateLimit", &config)], &to("c"), &json!({}))
    };
    let listeners = [listener("never", &[limit("100000s")]), listener("soon", &[limit("1.5s")])];
    let folder = tempfile::tempdir().unwrap();
    let clusters = [cluster("c", echo().await, false)];
    let program = Program::start(folder.path(), &bootstrap(&listeners, &clusters)).await;
    let connect = async |name| Client::new(TcpStream::connect(program.listener(name).await).await.unwrap());
    let ask = async |client: &mut Client| {
        client.send("GET / HTTP/1.1\r\nhost: a\r\n\r\n").await;
        client.message().await.0[9..12].to_owned()
    };
    let mut client = connect("never").await;
    for expected in ["200", "200", "200", "429", "429", "429"] {
        assert_eq!(ask(&mut client).await, expected);
    }
    let mut client = connect("soon").await;
    for wanted in ["429", "200", "429", "200"] {
        within(async { while ask(&mut client).await != wanted {} }).await;
    }
}
