"""Load reports for load balancers, by ORCA (open request cost aggregation).

The load of this service's engines, its reports at the ends of calls, and the stream of them.

From the top:
    call_reports, open_rca_service   the two ways in which reports leave
    load_watch                       asks the engines while somebody reads reports
    load_window                      what the engines' answers come to over some seconds
"""
