//! Speaks CoderVPN over any reader and writer.
