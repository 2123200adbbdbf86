//! Changes of a mock service while it runs, and the endpoint for them: GET returns the behaviour, PUT sets it.

use std::{
    convert::Infallible,
    io,
    net::{SocketAddr, TcpListener},
    sync::Arc,
};

use axum::{
    Json, Router,
    extract::State,
    http::StatusCode,
    middleware,
    response::{IntoResponse, Response},
    routing::get,
};
use tokio::sync::{Mutex, mpsc, watch};

use crate::graph::behavior::WorkerBehavior;

/// State that the threads of a mock service follow.
#[derive(Clone)]
pub(super) struct WorkerState {
    pub(super) behavior: WorkerBehavior,
    /// Socket to accept connections from; `None` while the service is down.
    pub(super) open: Option<Arc<OpenListener>>,
}

/// A listening socket. A thread holds it until it has closed the socket and its connections.
pub(super) struct OpenListener {
    pub(super) socket: TcpListener,
    _held: mpsc::Sender<Infallible>,
}

/// Changes the state of a mock service.
pub(super) struct WorkerSwitch {
    pub(super) address: SocketAddr,
    state: watch::Sender<WorkerState>,
    /// Ends once no thread holds the socket.
    closed: mpsc::Receiver<Infallible>,
}

impl OpenListener {
    fn bind(address: SocketAddr) -> io::Result<(Arc<Self>, mpsc::Receiver<Infallible>)> {
        let socket = TcpListener::bind(address)?;
        socket.set_nonblocking(true)?;
        let (held, closed) = mpsc::channel(1);
        Ok((Arc::new(Self { socket, _held: held }), closed))
    }
}

impl WorkerSwitch {
    /// Opens the port of a service with the behaviour of its graph.
    ///
    /// # Errors
    /// The port cannot be opened.
    pub(super) fn open(address: SocketAddr) -> io::Result<Self> {
        let (open, closed) = OpenListener::bind(address)?;
        let address = open.socket.local_addr()?;
        let state = WorkerState { behavior: WorkerBehavior::default(), open: Some(open) };
        Ok(Self { address, state: watch::Sender::new(state), closed })
    }

    /// Returns the state for a thread, which has not seen it yet.
    pub(super) fn watch(&self) -> watch::Receiver<WorkerState> {
        let mut state = self.state.subscribe();
        state.mark_changed();
        state
    }

    /// Sets the behaviour. A service that goes down has closed its port and connections when this returns.
    ///
    /// # Errors
    /// The port of a service that was down cannot be opened.
    async fn set(&mut self, behavior: WorkerBehavior) -> io::Result<()> {
        let is_down = behavior.down;
        let mut open = self.state.borrow().open.clone().filter(|_| !is_down);
        if open.is_none() && !is_down {
            let (opened, closed) = OpenListener::bind(self.address)?;
            (open, self.closed) = (Some(opened), closed);
        }
        self.state.send_replace(WorkerState { behavior, open });
        while is_down && self.closed.recv().await.is_some() {}
        Ok(())
    }
}

/// Serves the endpoint; never returns.
pub(super) async fn serve(listener: tokio::net::TcpListener, switch: WorkerSwitch) -> Infallible {
    let router = Router::new()
        .route("/", get(read).put(write))
        .layer(middleware::from_fn(skysail_admin::local_only))
        .with_state(Arc::new(Mutex::new(switch)));
    skysail_admin::serve(listener, router).await
}

async fn read(State(switch): State<Arc<Mutex<WorkerSwitch>>>) -> Json<WorkerBehavior> {
    Json(switch.lock().await.state.borrow().behavior.clone())
}

/// Sets the behaviour in the body, which is JSON of any content type. Fields that are absent become those of the graph.
async fn write(State(switch): State<Arc<Mutex<WorkerSwitch>>>, body: String) -> Response {
    let behavior: WorkerBehavior = match serde_json::from_str(&body) {
        Ok(behavior) => behavior,
        Err(error) => return (StatusCode::BAD_REQUEST, format!("{error}\n")).into_response(),
    };
    match switch.lock().await.set(behavior.clone()).await {
        Ok(()) => Json(behavior).into_response(),
        Err(error) => {
            (StatusCode::CONFLICT, format!("cannot open the port again: {error}\n")).into_response()
        }
    }
}
