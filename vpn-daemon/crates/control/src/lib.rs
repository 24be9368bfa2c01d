//! Everything said to coderd.
//!
//! * [`api`]: REST calls before a start, and every way they can fail, in words for a user.
//! * [`mux`]: yamux over one byte stream, both roles. [`rpc`]: dRPC calls over its streams, both halves. [`tailnet`]: the
//!   five calls of the tailnet service with their types. The testbed's server is built on these three.
//! * [`controller`]: the life of the control connection: dial, run, lose, back off, dial again, leave gracefully. It owns
//!   the parts that run on a connection: [`coordination`], [`derp_maps`], [`workspace_updates`], [`resume_token`],
//!   [`telemetry`]. Users talk to it through [`Handle`] and a channel of [`ControlEvent`]s.
//! * [`convert`]: protobuf from and to the validated types of `wire`.
//!
//! Tokens are [`secrecy::SecretString`]s from end to end; no error, event or log line of this crate holds one (S-03).
//! What an event tells is logged here at DEBUG only: how loud it is, is for its receiver to decide.

#![forbid(unsafe_code)]

pub mod api;
pub mod controller;
pub mod convert;
pub mod coordination;
pub mod derp_maps;
pub mod event;
pub mod mux;
mod refusals;
pub mod resume_token;
pub mod rpc;
pub mod tailnet;
pub mod telemetry;
pub mod workspace_updates;

pub use api::{Api, ApiError, ConnectionSettings, Deployment, Obstacle, User};
pub use controller::{Controller, ControllerConfig, ControllerRole, Handle, WebSocketDialer};
pub use event::{ControlEvent, PeerUpdate, PeerUpdateKind};
pub use workspace_updates::{Agent, Workspace, WorkspaceStatus, WorkspaceUpdate};
